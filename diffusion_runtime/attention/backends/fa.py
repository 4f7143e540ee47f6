"""FlashAttention: the fastest generation that is installed for the chip and takes the head size."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.backends.capability import AttentionRequirements, Capability, HeadSizes
from diffusion_runtime.attention.backends.fa2 import FlashAttention2
from diffusion_runtime.attention.backends.fa3 import FlashAttention3
from diffusion_runtime.attention.backends.fa4 import FlashAttention4
from diffusion_runtime.attention.backends.flash_attention import FLASH_DTYPES, FLASH_FEATURES, FlashAttention
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, CallForm
from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import Hardware, detect_hardware

_logger = logging.getLogger("diffusion_runtime.attention")

# Fastest first, on the chips that they share.
_GENERATIONS: tuple[FlashAttention, ...] = (FlashAttention4(), FlashAttention3(), FlashAttention2())


def _refusals(generation: FlashAttention, hardware: Hardware, head_dim: int) -> list[str]:
    """Return why a generation cannot serve a plain call of this head size here; reasons of the chip come first."""
    requirements = AttentionRequirements("self", "self", head_dim, "bfloat16", hardware, num_heads=1, num_kv_heads=1)
    return generation.capability.refusals(requirements)


def _installed(hardware: Hardware) -> list[FlashAttention]:
    """Generations that are installed and made for the chip, fastest first. All of them take head size 64."""
    there = [generation for generation in _GENERATIONS if generation.probe(hardware).version is not None]
    return [generation for generation in there if not _refusals(generation, hardware, head_dim=64)]


def serving_generation(
    requirements: AttentionRequirements, *, importing: bool = False
) -> tuple[FlashAttention | None, list[tuple[FlashAttention, Availability]]]:
    """The generation that `fa` stands for, None when none can serve; and those before it that cannot be imported.

    Which ones import is known of this process's own machine alone; of any other, the first that fits is taken.
    importing: import them though they are remembered to.
    """
    broken: list[tuple[FlashAttention, Availability]] = []
    for generation in _installed(requirements.hardware):
        if generation.capability.refusals(requirements):
            continue
        if not requirements.hardware.is_here:
            return generation, []
        found = generation.imported(requirements) if importing else generation.importable(requirements)
        if found.version is not None:
            return generation, broken
        broken.append((generation, found))
    return None, broken


def fastest_generation(hardware: Hardware, head_dim: int, dtype: str = "bfloat16") -> FlashAttention | None:
    """The generation that `fa` stands for; None when no installed one serves this head size on this chip."""
    return serving_generation(
        AttentionRequirements("self", "self", head_dim, dtype, hardware, num_heads=1, num_kv_heads=1)
    )[0]


@functools.lru_cache(maxsize=64)
def _generation_for(device: torch.device, head_dim: int, dtype: torch.dtype) -> FlashAttention:
    generation = fastest_generation(detect_hardware(str(device)), head_dim, str(dtype).removeprefix("torch."))
    assert generation is not None, "selection asks the capability, and imports, first"
    return generation


@functools.cache
def _log_passed_over(generation: FlashAttention, reason: str, taken: str) -> None:
    """Logged once per process: who installed the fastest generation expects it to run."""
    _logger.warning("fa takes %s and passes over %s: %s", taken, generation.name, reason)


@dataclass(frozen=True)
class _AnyGeneration(Capability):
    """The union of what the generations can do; on a machine, of those that are installed there."""

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        reasons = super().refusals(requirements)
        installed = _installed(requirements.hardware)
        if reasons or not installed:
            return reasons
        refused = [(generation.name, generation.capability.refusals(requirements)) for generation in installed]
        if not all(found for _, found in refused):
            return []
        return [f"{name} {reason}" for name, found in refused for reason in found]


@register_backend
class AnyFlashAttention(ImportingBackend):
    """FA4 on sm_90 and newer, FA3 on sm_90, FA2 on sm_80 and newer and on ROCm: the first that is there and imports."""

    distributions = tuple(generation.distribution for generation in _GENERATIONS)
    name = "fa"
    summary = "FlashAttention, the fastest generation installed for this chip"
    not_replayed = None
    capability = _AnyGeneration(
        platforms=frozenset({"cuda", "rocm"}),
        dtypes=FLASH_DTYPES,
        head_sizes=HeadSizes(minimum=8, maximum=256, multiple=8),
        features=FLASH_FEATURES,
        minimum_capability=(8, 0),
    )

    def probe(self, hardware: Hardware) -> Availability:
        installed = _installed(hardware)
        if installed:
            return Availability(f"{installed[0].name} {installed[0].probe(hardware).version}")
        for_chip = [generation for generation in _GENERATIONS if not _refusals(generation, hardware, head_dim=64)]
        others = [g for g in _GENERATIONS if g.distribution in hardware.packages and g not in for_chip]
        reason = "FlashAttention is not installed"
        if others:
            misfits = "; ".join(f"{g.distribution} {_refusals(g, hardware, 64)[0]}" for g in others)
            reason = f"no FlashAttention for this device is installed: {misfits}"
        # Without a chip that any of them serves, the capability gives the reason.
        fix = for_chip[0].install if for_chip else ""
        return Availability(None, reason, fix)

    def compiles_at_first_call(self, hardware: Hardware) -> bool:
        return any(generation.compiles_at_first_call(hardware) for generation in _installed(hardware))

    def versions(self, hardware: Hardware) -> str:
        generation = fastest_generation(hardware, head_dim=64) or _installed(hardware)[0]
        return generation.versions(hardware)

    def imported(self, requirements: AttentionRequirements) -> Availability:
        return self._serving(requirements, importing=True)

    def importable(self, requirements: AttentionRequirements) -> Availability:
        return self._serving(requirements, importing=False)

    def import_ahead(self, requirements: AttentionRequirements) -> None:
        generation = serving_generation(requirements)[0]
        if generation is not None:
            generation.import_ahead(requirements)

    def _serving(self, requirements: AttentionRequirements, *, importing: bool) -> Availability:
        generation, broken = serving_generation(requirements, importing=importing)
        if generation is not None:
            for other, found in broken:
                _log_passed_over(other, found.reason, generation.name)
            return Availability(f"{generation.name} {generation.probe(requirements.hardware).version}")
        reasons, fixes = [found.reason for _, found in broken], [found.fix for _, found in broken]
        return Availability(None, "; ".join(reasons), fixes[0])

    def expected_implementation(self, form: CallForm) -> str | None:
        requirements = AttentionRequirements(
            form.layer.role,
            "self",
            form.q_shape[3],
            str(form.dtype).removeprefix("torch."),
            form.hardware,
            num_heads=form.q_shape[2],
            num_kv_heads=form.k_shape[2],
        )
        generation = serving_generation(requirements)[0]
        return None if generation is None else generation.expected_implementation(form)

    def run(self, call: AttentionCall) -> AttentionResult:
        return _generation_for(call.q.device, call.q.shape[3], call.q.dtype).run(call)
