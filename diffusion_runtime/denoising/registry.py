"""Sampler name -> sampler, as diffusion_runtime/request/samplers.py registers them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from diffusion_runtime.denoising.interface import Sampler
from diffusion_runtime.errors import RequestError, nearest
from diffusion_runtime.request.samplers import SAMPLERS

# (num_steps, flow_shift, options, sigmas) -> sampler: how every registered class is called.
_SamplerClass: TypeAlias = Callable[[int, float, Mapping[str, Any], tuple[float, ...] | None], Sampler]


def build_sampler(
    name: str,
    num_steps: int,
    flow_shift: float,
    options: Mapping[str, Any],
    sigmas: tuple[float, ...] | None = None,
) -> Sampler:
    """Build the sampler of that name. Raises RequestError for an unknown one.

    options: from SchedulerConfig.options_for(name). sigmas: from FlowSchedule.sigmas.
    """
    if name not in SAMPLERS:
        raise RequestError(f"sampler: unknown value {name!r}.{nearest(name, SAMPLERS)}")
    module, _, class_name = SAMPLERS[name].implementation.partition(":")
    sampler_class = cast(_SamplerClass, getattr(importlib.import_module(module), class_name))
    return sampler_class(num_steps, flow_shift, options, sigmas)
