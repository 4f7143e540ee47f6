"""FlashAttention: the fastest generation that is installed for the chip and takes the head size."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.backends.fa2 import FlashAttention2
from diffusion_runtime.attention.backends.fa3 import FlashAttention3
from diffusion_runtime.attention.backends.fa4 import FlashAttention4
from diffusion_runtime.attention.backends.flash_attention import FLASH_DTYPES, FLASH_FEATURES, FlashAttention
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Capability,
    HeadSizes,
    Question,
)
from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.hardware import Hardware, detect_hardware

# Fastest first, on the chips that they share.
_GENERATIONS: tuple[FlashAttention, ...] = (FlashAttention4(), FlashAttention3(), FlashAttention2())


def _refusals(generation: FlashAttention, hardware: Hardware, head_dim: int) -> list[str]:
    """Why a generation cannot serve a plain call of this head size here; the chip first."""
    question = Question("self", "self", head_dim, "bfloat16", hardware, num_heads=1, num_kv_heads=1)
    return generation.capability.refusals(question)


def _installed(hardware: Hardware) -> list[FlashAttention]:
    """Generations that are installed and made for the chip, fastest first. All of them take head size 64."""
    there = [generation for generation in _GENERATIONS if generation.probe(hardware).version is not None]
    return [generation for generation in there if not _refusals(generation, hardware, head_dim=64)]


def fastest_generation(hardware: Hardware, head_dim: int) -> FlashAttention | None:
    """The generation that `fa` stands for; None when no installed one serves this head size on this chip."""
    fitting = (generation for generation in _installed(hardware) if not _refusals(generation, hardware, head_dim))
    return next(fitting, None)


@functools.lru_cache(maxsize=64)
def _generation_for(device: torch.device, head_dim: int) -> FlashAttention:
    generation = fastest_generation(detect_hardware(str(device)), head_dim)
    assert generation is not None, "selection asks the capability first"
    return generation


@dataclass(frozen=True)
class _AnyGeneration(Capability):
    """What the generations can do between them; on a machine, what those that are installed there can."""

    def refusals(self, question: Question) -> list[str]:
        reasons = super().refusals(question)
        installed = _installed(question.hardware)
        if reasons or not installed:
            return reasons
        refused = [(generation.name, generation.capability.refusals(question)) for generation in installed]
        if not all(found for _, found in refused):
            return []
        return [f"{name} {reason}" for name, found in refused for reason in found]


@register_backend
class AnyFlashAttention(ImportingBackend):
    """FA4 on sm_90 and sm_100/103, FA3 on sm_90, FA2 on sm_80 and newer and on ROCm, whichever is there."""

    name = "fa"
    summary = "FlashAttention, the fastest generation installed for this chip"
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
        # Without a chip that any of them serves, the capability says why.
        fix = for_chip[0].install if for_chip else ""
        return Availability(None, reason, fix)

    def versions(self, hardware: Hardware) -> str:
        return _installed(hardware)[0].versions(hardware)

    def import_error(self, hardware: Hardware) -> str | None:
        installed = _installed(hardware)
        return installed[0].import_error(hardware) if installed else None

    def run(self, call: AttentionCall) -> AttentionResult:
        return _generation_for(call.q.device, call.q.shape[3]).run(call)
