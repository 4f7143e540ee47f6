"""Dynamic shift read from scheduler_config.json, for models with linear sigmas from 1 to 1 / num_steps."""

from __future__ import annotations

import math

from diffusion_runtime.denoising.flow_schedule import FlowSchedule, LinearSigmas, ShiftByTokens
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError, shown

_SHIFT_TYPES = ("exponential", "linear")


def token_shift(scheduler: SchedulerConfig) -> FlowSchedule:
    """The line from tokens to shift that scheduler_config.json describes; a fixed shift where it describes none.

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
