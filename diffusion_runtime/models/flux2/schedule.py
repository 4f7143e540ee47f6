"""How FLUX.2 spaces its noise levels: a shift by tokens and steps that its authors fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion_runtime.denoising.flow_schedule import FlowSchedule, LinearSigmas, ShiftByTokens
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.denoising.token_shift import token_shift

# Slope and intercept of the shift's logarithm over the number of tokens, for 10 steps and for 200.
_AT_10_STEPS = 8.73809524e-05, 1.89833333
_AT_200_STEPS = 0.00016927, 0.45666666
# Of more tokens than this the steps play no part.
_MAX_TOKENS_BY_STEPS = 4300


@dataclass(frozen=True)
class EmpiricalShift(LinearSigmas):
    """A shift whose logarithm is linear in the number of tokens, and between 10 and 200 steps on the line through
    both.

    is_exponential: False takes the line itself for the shift and not its logarithm.
    """

    is_exponential: bool = True

    def flow_shift(self, num_tokens: int, num_steps: int) -> float:
        at_200 = _AT_200_STEPS[0] * num_tokens + _AT_200_STEPS[1]
        at_10 = _AT_10_STEPS[0] * num_tokens + _AT_10_STEPS[1]
        value = at_200
        if num_tokens <= _MAX_TOKENS_BY_STEPS:
            value += (at_200 - at_10) / 190 * (num_steps - 200)
        return math.exp(value) if self.is_exponential else value


def read_schedule(scheduler: SchedulerConfig) -> FlowSchedule:
    """The schedule of a folder, whose file has a line of its own in the shift's place; a fixed shift where the file
    asks for none that follows the size. Raises ModelLoadError."""
    line = token_shift(scheduler)
    return EmpiricalShift(line.is_exponential) if isinstance(line, ShiftByTokens) else line
