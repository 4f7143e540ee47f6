"""Noise schedule of a flow-matching model: the sigmas of a number of steps, and dynamic (resolution-dependent)
shift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError, RequestError, shown

# One noise level, or several.
Levels = TypeVar("Levels", float, torch.Tensor)


def shifted(sigma: Levels, flow_shift: float) -> Levels:
    """Return a noise level in [0, 1] after the flow shift of Esser et al., arXiv:2403.03206. A shift of e^mu is
    diffusers' exponential dynamic shift with that mu."""
    return flow_shift * sigma / (1 + (flow_shift - 1) * sigma)


class FlowSchedule:
    """A model's schedule beyond its scheduler's file. This one adds nothing: the scheduler spaces its own sigmas, and
    the flow shift is a fixed number."""

    def flow_shift(self, num_tokens: int, num_steps: int) -> float | None:
        """Return the shift for a clip of `num_tokens` grid tokens in `num_steps` steps, or None when it is a fixed
        number."""
        return None

    def sigmas(self, num_steps: int) -> tuple[float, ...] | None:
        """Return the unshifted noise levels of the steps, from 1 down, without the final 0; None for the scheduler's
        own."""
        return None

    def levels(self, num_steps: int, flow_shift: float) -> tuple[float, ...] | None:
        """Return the noise levels of the steps as they run, without the final 0; None for those of `sigmas` after the
        flow shift. Raises RequestError for a number of steps that there is no schedule of."""
        return None

    def check_sampler(self, name: str) -> None:
        """Raises RequestError for a sampler that does not fit what the model predicts."""


@dataclass(frozen=True)
class TrainedLevels(FlowSchedule):
    """Evenly spaced noise levels after the flow shift, each moved to the nearest one of the training (MOSS-Image,
    arXiv:2610.23374). num_levels: of the training, which are evenly spaced before training_shift."""

    num_levels: int = 1000
    training_shift: float = 1.0

    def levels(self, num_steps: int, flow_shift: float) -> tuple[float, ...]:
        trained = self._grid(self.num_levels, self.training_shift).flip(0)
        wanted = self._grid(num_steps, flow_shift)
        above = torch.searchsorted(trained, wanted).clamp(max=self.num_levels - 1)
        below = (above - 1).clamp(min=0)
        is_below = (wanted - trained[below]).abs() <= (trained[above] - wanted).abs()
        found = trained[torch.where(is_below, below, above)]
        if len(torch.unique_consecutive(found)) < num_steps:
            raise RequestError(
                f"num_inference_steps: {num_steps} steps are closer to each other than the {self.num_levels} noise "
                "levels of the training; expected fewer"
            )
        return tuple(found.tolist())

    def _grid(self, count: int, shift: float) -> torch.Tensor:
        """Return levels from 1 to that of the last timestep, both shifted, float32."""
        lowest = shift / (self.num_levels + shift - 1)
        return shifted(torch.linspace(1, lowest, count), shift)


@dataclass(frozen=True)
class LinearSigmas(FlowSchedule):
    """Linear sigmas, from 1 down to 1 / num_steps; a fixed shift is applied afterwards."""

    def sigmas(self, num_steps: int) -> tuple[float, ...]:
        return tuple(1 - index / num_steps for index in range(num_steps))


_OF_FLOW_MAPS = ("flow_map_euler", "flow_match_euler")


class FlowMapSchedule(FlowSchedule):
    """Noise levels of a flow map, which may be any."""

    def check_sampler(self, name: str) -> None:
        """Refuse samplers that take the velocity at t, or one to remove all noise with. Raises RequestError."""
        if name not in _OF_FLOW_MAPS:
            raise RequestError(
                f"sampler: {name} does not integrate the mean velocity from one timestep to the next, which this model "
                f"predicts; leave it out, or set {' or '.join(_OF_FLOW_MAPS)}"
            )


# Of LinearQuadraticSigmas: how far the line goes.
_LINEAR_NOISE = 0.025


@dataclass(frozen=True)
class LinearQuadraticSigmas(FlowSchedule):
    """A line from 1 to 0.975 in half of the steps, and from there a parabola to 0 with the same slope at their meeting
    (Movie Gen, arXiv:2410.13720, section 3.4.2); a fixed shift is applied afterwards."""

    def sigmas(self, num_steps: int) -> tuple[float, ...]:
        num_linear = num_steps // 2
        if num_linear == 0:
            return (1.0,)
        num_quadratic = num_steps - num_linear
        slope, missing = _LINEAR_NOISE / num_linear, num_linear - _LINEAR_NOISE * num_steps
        bend = missing / (num_linear * num_quadratic**2)
        tilt = slope - 2 * missing / num_quadratic**2
        risen = [slope * index for index in range(num_linear)]
        risen += [bend * (index**2 + num_linear**2) + tilt * index for index in range(num_linear, num_steps)]
        return tuple(1 - each for each in risen)


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


_SHIFT_TYPES = ("exponential", "linear")


def token_shift(scheduler: SchedulerConfig) -> FlowSchedule:
    """Return the line from tokens to shift that scheduler_config.json describes; a fixed shift where it describes none.

    Raises ModelLoadError for values that make no line.
    """
    if not scheduler.shifts_by_size:
        return LinearSigmas()
    kind = scheduler.values.get("time_shift_type", "exponential")
    if kind not in _SHIFT_TYPES:
        raise ModelLoadError(f"{scheduler.path}: time_shift_type: expected one of {_SHIFT_TYPES}, got {kind!r}")
    base_tokens, max_tokens = (
        _number(scheduler, "base_image_seq_len", 256),
        _number(scheduler, "max_image_seq_len", 4096),
    )
    if max_tokens <= base_tokens:
        raise ModelLoadError(
            f"{scheduler.path}: max_image_seq_len: expected more than base_image_seq_len, {base_tokens:g}, got "
            f"{max_tokens:g}"
        )
    return ShiftByTokens(
        base_tokens=int(base_tokens),
        max_tokens=int(max_tokens),
        base_log_shift=_number(scheduler, "base_shift", 0.5),
        max_log_shift=_number(scheduler, "max_shift", 1.15),
        is_exponential=kind == "exponential",
    )


def _number(scheduler: SchedulerConfig, key: str, default: float) -> float:
    """default: the value of diffusers' class where the file leaves the key out."""
    value = scheduler.values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelLoadError(f"{scheduler.path}: {key}: expected a number, got {shown(value)}")
    return float(value)
