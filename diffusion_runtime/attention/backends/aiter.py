"""AITER, AMD's kernels for ROCm: package amd-aiter (the `aiter` of the package index is another project)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes
from diffusion_runtime.attention.backends.flash_attention import FLASH_DTYPES, FLASH_FEATURES, FlashAttention
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, CallForm
from diffusion_runtime.attention.backends.key_ranges import PackedCall
from diffusion_runtime.attention.backends.registry import register_backend


@functools.cache
def _kernels() -> tuple[Callable[..., Any], ...]:
    return AiterBackend().first_call_functions()


@register_backend
class AiterBackend(FlashAttention):
    """aiter.flash_attn_func, which has FlashAttention-2's form with `return_lse`."""

    name = "aiter"
    summary = "AMD's AITER kernels"
    distribution = "amd-aiter"
    module = "aiter"
    functions = ("flash_attn_func", "flash_attn_varlen_func")
    install = (
        "git clone --recursive https://github.com/ROCm/aiter && cd aiter && python setup.py develop, "
        "or a wheel from its releases"
    )
    capability = Capability(
        platforms=frozenset({"rocm"}),
        dtypes=FLASH_DTYPES,
        head_sizes=HeadSizes(minimum=8, maximum=256, multiple=8),
        features=FLASH_FEATURES,
    )

    def expected_implementation(self, form: CallForm) -> str | None:  # noqa: ARG002
        return "aiter"

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> AttentionResult:
        result = _kernels()[0](q, k, v, softmax_scale=call.scale, causal=causal, return_lse=call.return_lse)
        return _result(call, result, "aiter")

    def attend_packed(self, call: AttentionCall, packed: PackedCall) -> AttentionResult:
        result = _kernels()[1](
            packed.q,
            packed.k,
            packed.v,
            packed.q_offsets,
            packed.k_offsets,
            packed.seq_q,
            packed.max_length,
            softmax_scale=call.scale,
            return_lse=call.return_lse,
        )
        return _result(call, result, "aiter varlen")


def _result(call: AttentionCall, result: Any, implementation: str) -> AttentionResult:
    """Versions differ in whether a call that asks for nothing else returns out or (out,)."""
    out = result[0] if isinstance(result, (tuple, list)) else result
    return AttentionResult(out, result[1] if call.return_lse else None, implementation)
