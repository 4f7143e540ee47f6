"""Sampler name -> sampler, as diffusion_runtime/request/samplers.py registers them; and the sampler of a resolved
request, with its noise levels from the request or from the model's schedule."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from diffusion_runtime.denoising.flow_schedule import FlowSchedule, shifted
from diffusion_runtime.denoising.interface import Sampler, SamplerClass
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError, RequestError, nearest, shown
from diffusion_runtime.request.generation_request import GenerationRequest
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


def sampler_of(request: GenerationRequest, scheduler: SchedulerConfig, schedule: FlowSchedule) -> Sampler:
    """Return the sampler that a resolved request runs.

    Raises RequestError for noise levels that differ in number from the steps, and for values that the sampler does not
    use; ModelLoadError for settings of the folder that it refuses; RequestError for one that does not fit the model.
    """
    name, num_steps, flow_shift = request.sampler, request.num_inference_steps, request.flow_shift
    assert name is not None
    assert num_steps is not None
    assert flow_shift is not None
    schedule.check_sampler(name)
    options = {**scheduler.options_for(name), **_stretch(request, name)}
    if request.sigmas is not None:
        levels, field = request.sigmas, "sigmas"
    elif request.sigmas_before_shift is not None:
        levels, field = tuple(shifted(t, flow_shift) for t in request.sigmas_before_shift), "sigmas_before_shift"
    else:
        as_they_run = schedule.levels(num_steps, flow_shift) if SAMPLERS[name].takes_levels else None
        if as_they_run is not None:
            return build_sampler(name, num_steps, 1.0, options, as_they_run)
        return build_sampler(name, num_steps, flow_shift, options, schedule.sigmas(num_steps))
    if not SAMPLERS[name].takes_levels:
        others = " or ".join(other for other, declared in SAMPLERS.items() if declared.takes_levels)
        raise RequestError(f"{field}: {name} spaces its own noise levels; leave them out, or set sampler to {others}")
    if len(levels) != num_steps:
        raise RequestError(
            f"{field}: expected {num_steps} noise levels, one per step, got {len(levels)}: leave out "
            "num_inference_steps, which then follows from them, or say as many"
        )
    # The folder's settings of its own schedule do not hold for them.
    kept = {key: options[key] for key in ("num_train_timesteps",) if key in options}
    if request.sigmas is None:
        kept |= _stretch(request, name)
    return build_sampler(name, num_steps, 1.0, kept, levels)


def _stretch(request: GenerationRequest, name: str) -> dict[str, float | None]:
    """Return the scheduler setting that a request's shift_terminal stands for. Raises RequestError."""
    if request.shift_terminal is None:
        return {}
    if SAMPLERS[name].stretches:
        return {"shift_terminal": request.shift_terminal or None}
    if not request.shift_terminal:
        # There is nothing to turn off.
        return {}
    others = " or ".join(other for other, declared in SAMPLERS.items() if declared.stretches)
    raise RequestError(
        f"shift_terminal: {name} does not stretch its schedule; leave it out, or set sampler to {others}"
    )
