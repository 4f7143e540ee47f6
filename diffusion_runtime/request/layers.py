"""Request values of several levels, such as a model's defaults, a preset and the request itself, as one mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusion_runtime.core.spellings import own_name
from diffusion_runtime.request.fields import OneOf, parse_levels
from diffusion_runtime.request.samplers import SAMPLERS

# The fields that say the noise level of every step.
EXPLICIT_LEVELS = ("sigmas", "sigmas_before_shift")
# Ways to say how long a video is: as one of them, or within the bounds of the last.
LENGTHS = (("num_frames",), ("seconds",), ("min_seconds", "max_seconds"))


class SamplerName(OneOf):
    """The name of a sampler, in another project's spelling too (`euler`)."""

    def read(self, value: object) -> object:
        """Return our name of a sampler; any other value as it is."""
        return own_name("sampler", value, SAMPLERS)


def layered(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Request values of several levels by field name, where a later level wins over an earlier one.

    A level that says guidance_scale without guidance_scale_2 means both experts: no second scale of an earlier level
    stands beside it; one that says sampler without first_chunk_sampler means every chunk. One that says a length in
    one of the LENGTHS means none of an earlier level in another. A level that says noise levels says the number of
    steps with them, and those of an earlier level go where a later one says another number of steps, or a sampler
    that spaces its own.
    """
    values: dict[str, Any] = {}
    for level in levels:
        if level.get("guidance_scale") is not None:
            values.pop("guidance_scale_2", None)
        if level.get("sampler") is not None:
            values.pop("first_chunk_sampler", None)
        given = [names for names in LENGTHS if any(level.get(name) is not None for name in names)]
        for name in (name for names in LENGTHS if given and names not in given for name in names):
            values.pop(name, None)
        for name in EXPLICIT_LEVELS:
            if level.get(name) is not None or _replaces_levels(level, values.get(name)):
                values = {key: value for key, value in values.items() if key not in EXPLICIT_LEVELS}
        values.update(level)
        stated = next((parse_levels(level[name]) for name in EXPLICIT_LEVELS if level.get(name) is not None), None)
        if isinstance(stated, tuple) and level.get("num_inference_steps") is None:
            values["num_inference_steps"] = len(stated)
    return values


def _replaces_levels(level: Mapping[str, Any], earlier: Any) -> bool:
    """Return whether noise levels of an earlier level do not fit the number of steps or the sampler of `level`."""
    levels = parse_levels(earlier)
    if not isinstance(levels, tuple):
        return False
    sampler = SAMPLERS.get(own_name("sampler", level.get("sampler", ""), SAMPLERS))
    num_steps = level.get("num_inference_steps")
    return (sampler is not None and not sampler.takes_levels) or (num_steps is not None and num_steps != len(levels))
