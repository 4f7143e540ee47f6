"""Dry run of a folder's scheduler settings on a few numbers, before any weight is read.

Some invalid settings show at the first step only, or not at all: a final noise level of `sigma_min` divides by 0,
Karras' levels may leave [0, 1]. So the whole loop is run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError, shown


def try_scheduler(
    config: SchedulerConfig, sampler: str, num_steps: int, flow_shift: float, sigmas: tuple[float, ...] | None
) -> None:
    """Run the whole loop of a sampler with the settings of `config`; 30 ms for 50 steps.

    Raises ModelLoadError that names the file and the key without which it would run.
    """

    def trouble(options: Mapping[str, Any]) -> str | None:
        return _trouble(lambda: build_sampler(sampler, num_steps, flow_shift, options, sigmas).sample(_noise(), _model))

    options = config.options_for(sampler)
    reason = trouble(options)
    if reason is None:
        return
    for key, value in options.items():
        if trouble({other: setting for other, setting in options.items() if other != key}) is None:
            raise ModelLoadError(f"{config.path}: key {key!r}: {shown(value)} cannot be used: {reason}")
    raise ModelLoadError(f"{config.path}: these settings cannot be used: {reason}")


def _trouble(run: Callable[[], torch.Tensor]) -> str | None:
    """Return why the loop cannot be used, or None."""
    try:
        with numpy.errstate(all="ignore"):
            latents = run()
    except Exception as error:  # any exception: a solver may raise anything on unsupported numbers
        return str(error).removeprefix("scheduler/scheduler_config.json: ")
    return None if bool(latents.isfinite().all()) else "its steps give numbers that are not finite"


def _noise() -> torch.Tensor:
    return torch.linspace(-1, 1, 16).view(1, 2, 2, 2, 2)


def _model(latents: torch.Tensor, _step: object) -> torch.Tensor:
    return latents
