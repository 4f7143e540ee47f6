"""Remedies where a memory plan does not fit: flags to type, each tried by a plan of its own before it is
named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.memory.plan import WEIGHTS, MemoryDemand, Remedies, Remedy
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.memory_demand import PlannedRequest

# Of height and width, the largest first: the first that fits is named. Smaller ones no model was trained for.
_SIDES = (Fraction(3, 4), Fraction(1, 2))
_FRAMES = (Fraction(1, 2), Fraction(1, 4))


_ALL = frozenset({"text", "denoise", "decode", WEIGHTS})
_BOTH = frozenset({"denoise", "decode"})


@dataclass(frozen=True)
class Alternative:
    """A config, a dtype and a request beside those asked for; flags: that lead there; lowers: as a Remedy's."""

    config: RuntimeConfig
    dtype: torch.dtype
    planned: PlannedRequest
    flags: str = ""
    lowers: frozenset[str] = frozenset()

    def and_then(self, flags: str, lowers: Set[str], **changes: Any) -> Alternative:
        """The same with further changes."""
        both = f"{self.flags} {flags}".strip()
        return dataclasses.replace(self, flags=both, lowers=self.lowers | lowers, **changes)


def remedies_of(
    given: Alternative, model: Model[Any, Any], demand: Callable[[Alternative], MemoryDemand | None]
) -> Remedies:
    """given: what does not fit; demand: what an alternative takes."""
    changes = [each for each in (_in_16_bits, _in_two_passes, _in_tiles, _in_8_bits) if each(given, model) is not None]
    groups = [[found] for each in changes if (found := each(given, model)) is not None]
    groups += [_smaller(given, model.geometry), _shorter(given, model.geometry)]
    every = given
    for change in changes:
        every = change(every, model) or every
    smaller = _smaller(every, model.geometry)
    # The least of all at the end: what even that cannot do is said with its bytes.
    together = [every, *smaller, *_shorter(smaller[-1] if smaller else every, model.geometry)[-1:]]
    return Remedies(
        tuple(tuple(_remedy(each, demand) for each in group) for group in groups if group),
        tuple(_remedy(each, demand) for each in together if each is not given),
    )


def _remedy(alternative: Alternative, demand: Callable[[Alternative], MemoryDemand | None]) -> Remedy:
    def compute() -> MemoryDemand | None:
        try:
            return demand(alternative)
        except DiffusionRuntimeError:
            # What the model does not run with is no remedy.
            return None

    return Remedy(alternative.flags, compute, alternative.lowers)


def _in_16_bits(given: Alternative, model: Model[Any, Any]) -> Alternative | None:
    del model
    if given.dtype != torch.float32:
        return None
    return given.and_then("--dtype bfloat16", _ALL, dtype=torch.bfloat16)


def _in_two_passes(given: Alternative, model: Model[Any, Any]) -> Alternative | None:
    del model
    planned = given.planned
    if not (planned.is_batched and planned.is_guided):
        return None
    apart = dataclasses.replace(planned, is_batched=False)
    return given.and_then("--guidance-mode two_pass", {"denoise"}, planned=apart)


def _in_tiles(given: Alternative, model: Model[Any, Any]) -> Alternative | None:
    has_tiles = model.family.decoding.tiling is not None and given.config.vae_decoder is None
    if not has_tiles or given.config.vae_tiling not in ("auto", "off"):
        return None
    return given.and_then("--vae-tiling on", {"decode"}, config=dataclasses.replace(given.config, vae_tiling="on"))


def _in_8_bits(given: Alternative, model: Model[Any, Any]) -> Alternative | None:
    del model
    if given.config.quantization != "none":
        return None
    config = dataclasses.replace(given.config, quantization="fp8")
    # Of all phases: with `none` the transformer is there in each.
    return given.and_then("--quantization fp8", _ALL, config=config)


def _smaller(given: Alternative, geometry: LatentGeometry) -> list[Alternative]:
    """In the same proportions, as far as the sizes of the model allow."""
    size, found = given.planned.size, []
    rows, columns = (geometry.token_multiple * geometry.spatial_factor * each for each in geometry.patch[1:])
    for share in _SIDES:
        height, width = int(size.height * share) // rows * rows, int(size.width * share) // columns * columns
        if height and width:
            found.append(_sized(given, f"--height {height} --width {width}", height=height, width=width))
    return found


def _shorter(given: Alternative, geometry: LatentGeometry) -> list[Alternative]:
    size, found = given.planned.size, []
    step, remainder = geometry.frame_rule
    for share in _FRAMES:
        wanted = int(size.num_frames * share)
        number = wanted - (wanted - remainder) % step
        if 1 <= number < size.num_frames:
            found.append(_sized(given, f"--num-frames {number}", num_frames=number))
    return found


def _sized(given: Alternative, flags: str, **changes: int) -> Alternative:
    planned = given.planned
    request = dataclasses.replace(planned.request, **changes)  # type: ignore[arg-type]
    size = dataclasses.replace(planned.size, **changes)
    return given.and_then(flags, _BOTH, planned=dataclasses.replace(planned, size=size, request=request))
