"""Noise schedule of a flow-matching model: the sigmas of a number of steps, and dynamic (resolution-dependent)
shift."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion_runtime.errors import RequestError


class FlowSchedule:
    """A model's schedule beyond its scheduler's file. This one adds nothing: the scheduler spaces its own sigmas, and
    the flow shift is a fixed number."""

    def flow_shift(self, num_tokens: int, num_steps: int) -> float | None:
        """The shift for a clip of `num_tokens` grid tokens in `num_steps` steps; None when it is a fixed number."""
        return None

    def sigmas(self, num_steps: int) -> tuple[float, ...] | None:
        """The unshifted noise levels of the steps, from 1 down, without the final 0; None for the scheduler's own."""
        return None


@dataclass(frozen=True)
class LinearSigmas(FlowSchedule):
    """Linear sigmas, from 1 down to 1 / num_steps; a fixed shift is applied afterwards."""

    def sigmas(self, num_steps: int) -> tuple[float, ...]:
        return tuple(1 - index / num_steps for index in range(num_steps))


@dataclass(frozen=True)
class ShiftByTokens(LinearSigmas):
    """Dynamic shift: its logarithm is linear in the number of tokens (Esser et al., arXiv:2403.03206, section 5.3.2).

    The line goes through (base_tokens, base_log_shift) and (max_tokens, max_log_shift). is_exponential: False takes the
    line itself for the shift and not its logarithm.
    """

    base_tokens: int = 256
    max_tokens: int = 4096
    base_log_shift: float = 0.5
    max_log_shift: float = 1.15
    is_exponential: bool = True

    def flow_shift(self, num_tokens: int, num_steps: int) -> float:
        slope = (self.max_log_shift - self.base_log_shift) / (self.max_tokens - self.base_tokens)
        value = slope * (num_tokens - self.base_tokens) + self.base_log_shift
        try:
            return math.exp(value) if self.is_exponential else value
        except OverflowError as error:
            raise RequestError(
                f"flow_shift: the model's scheduler_config.json leads to e^{value:.0f} for {num_tokens} tokens: its "
                "base_shift, max_shift, base_image_seq_len or max_image_seq_len is damaged; set flow_shift, or copy "
                "the file again"
            ) from error
