"""Sampler registry: name -> sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.interface import Sampler
from diffusion_runtime.denoising.unipc import UniPCSampler
from diffusion_runtime.errors import RequestError, nearest

_SAMPLERS: dict[str, type[FlowMatchEulerSampler] | type[UniPCSampler]] = {
    "flow_match_euler": FlowMatchEulerSampler,
    "unipc": UniPCSampler,
}


def build_sampler(
    name: str,
    num_steps: int,
    flow_shift: float,
    options: Mapping[str, Any],
    sigmas: tuple[float, ...] | None = None,
) -> Sampler:
    """The sampler of that name. Raises RequestError for an unknown one.

    options: from SchedulerConfig.options_for(name). sigmas: from FlowSchedule.sigmas.
    """
    if name not in _SAMPLERS:
        raise RequestError(f"sampler: unknown value {name!r}.{nearest(name, _SAMPLERS)}")
    return _SAMPLERS[name](num_steps, flow_shift, options, sigmas)
