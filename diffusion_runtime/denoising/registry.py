"""Sampler name -> sampler, as diffusion_runtime/request/samplers.py registers them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from diffusion_runtime.denoising.interface import Sampler, SamplerClass
from diffusion_runtime.errors import ModelLoadError, RequestError, nearest, shown
from diffusion_runtime.request.samplers import SAMPLERS

_SETTINGS_FILE = Path("scheduler/scheduler_config.json")


def build_sampler(
    name: str,
    num_steps: int,
    flow_shift: float,
    options: Mapping[str, Any],
    sigmas: tuple[float, ...] | None = None,
) -> Sampler:
    """Build the sampler of that name. Raises RequestError for an unknown one, ModelLoadError as check_settings does.

    options: from SchedulerConfig.options_for(name). sigmas: from FlowSchedule.sigmas.
    """
    check_settings(name, options)
    return _class_of(name)(num_steps=num_steps, flow_shift=flow_shift, options=options, sigmas=sigmas)


def check_settings(name: str, options: Mapping[str, Any], file: Path = _SETTINGS_FILE) -> None:
    """Raises ModelLoadError for settings from `file` that the sampler of that name does not compute."""
    allowed = _class_of(name).settings
    for key, value in options.items():
        if key not in allowed or not allowed[key](value):
            raise ModelLoadError(
                f"{file}: key {key!r}: {shown(value)} is not supported by the sampler {name}; take it out "
                "where the model was not trained for it, or run the folder in diffusers with --backend diffusers"
            )


def _class_of(name: str) -> SamplerClass:
    if name not in SAMPLERS:
        raise RequestError(f"sampler: unknown value {name!r}.{nearest(name, SAMPLERS)}")
    module, _, class_name = SAMPLERS[name].implementation.partition(":")
    return cast(SamplerClass, getattr(importlib.import_module(module), class_name))
