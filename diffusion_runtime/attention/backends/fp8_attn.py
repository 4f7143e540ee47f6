"""Attention in 8-bit floats: cuDNN's kernel through nvidia-cudnn-frontend, or FlashInfer's, between Triton's passes
that quantise q, k and v and restore the output (kernels/fp8_attention).

A CPU runs the eager formula, which simulates the rounding in float32: it shows what the rounding costs, and is slower
than the other backends there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.attention.backends.capability import AttentionRequirements, Capability, HeadSizes
from diffusion_runtime.attention.backends.flashinfer_attn import FlashInferBackend
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    CallForm,
    RoundedOptions,
)
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_attention.api import fp8_attention
from diffusion_runtime.kernels.fp8_attention.flashinfer_kernel import FUNCTION, MODULE
from diffusion_runtime.kernels.fp8_attention.triton import HEAD_SIZES, Kernel
from diffusion_runtime.startup.importing import import_failure


@dataclass(frozen=True)
class Fp8Options(RoundedOptions):
    """kernel: what attends on a GPU. FlashInfer's is compiled by nvcc at the first call, for 81 s, and for Hopper
    alone."""

    kernel: Kernel = "cudnn"


@register_backend
class Fp8Backend(PackageBackend):
    """Quantises q, k and v of every call; padding is cut off before, so it has no part in scales and means."""

    name = "fp8_attn"
    summary = "attention in 8-bit floats: cuDNN's kernel"
    lossless = False
    options_type = Fp8Options
    # On normal inputs 0.058, with scores twice as large 0.078.
    error_bound = 0.1
    # Where few keys have large scores: 0.2 of 305 keys at twice the usual scale.
    lse_error_bound = 0.3
    distribution = "nvidia-cudnn-frontend"
    module = "cudnn"
    functions = ("create_handle", "pygraph")
    install = "pip install 'diffusion-runtime[fp8]'"
    not_replayed = None
    capability = Capability(
        platforms=frozenset({"cpu", "cuda"}),
        head_sizes=HeadSizes(only=HEAD_SIZES),
        features=frozenset({"key_padding", "gqa", "scale", "lse", "cached_keys"}),
        minimum_capability=(9, 0),
        # Keys of a text are few: quantising the queries takes longer than attention saves.
        categories=frozenset({"self"}),
    )

    def probe(self, hardware: Hardware) -> Availability:
        if hardware.platform != "cuda":
            return Availability(hardware.torch_version)
        if "triton" not in hardware.packages:
            return Availability(None, "quantising needs triton", self.install)
        return super().probe(hardware)

    def versions(self, hardware: Hardware) -> str:
        return super().versions(hardware) if hardware.platform == "cuda" else ""

    def is_compiled_ahead(self, hardware: Hardware) -> bool:
        # So one small call tells whether this chip and this cuDNN have the kernel.
        return hardware.platform == "cuda"

    def imported(self, requirements: AttentionRequirements) -> Availability:
        if requirements.hardware.platform != "cuda":
            return self.probe(requirements.hardware)
        return super().imported(requirements)

    def timed_by_default(self, hardware: Hardware) -> bool:
        return hardware.platform == "cuda"

    def check(self, options: Any, layer: LayerInfo, num_heads: int, num_steps: int | None) -> None:  # noqa: ARG002
        if options.kernel == "cudnn":
            return
        hardware = detect_hardware()
        found = FlashInferBackend().probe(hardware)
        if hardware.platform != "cuda" or hardware.capability != (9, 0):
            reason: str | None = f"FlashInfer has the kernel for sm_90 alone, this is {hardware.describe()}"
        elif found.version is None:
            reason = f"{found.reason} ({found.fix})"
        else:
            reason = import_failure(MODULE, FUNCTION)
        if reason is not None:
            raise ConfigError(f"fp8_attn: kernel=flashinfer: {reason}; leave kernel out for cuDNN's")

    def replay_refusal(self, options: Any) -> str | None:
        # For equal shapes every call launches the same kernels; cuDNN's graph is built at the first call of a shape.
        return None if options.kernel == "cudnn" else "kernel=flashinfer was never captured"

    def expected_implementation(self, form: CallForm) -> str | None:
        return f"fp8 {form.options.kernel if form.hardware.platform == 'cuda' else 'reference'}"

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_ranges(call, _attend)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    assert not causal, "the capability does not have it"
    kernel = call.options.kernel
    result = fp8_attention(q, k, v, scale=call.scale, return_lse=call.return_lse, kernel=kernel)
    return AttentionResult(result.out, result.lse, f"fp8 {result.implementation}")
