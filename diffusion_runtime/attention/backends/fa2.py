"""FlashAttention-2 (Dao, arXiv:2307.08691): package flash-attn, built from source, sm_80 and newer, and ROCm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes
from diffusion_runtime.attention.backends.flash_attention import FLASH_DTYPES, FLASH_FEATURES, FlashAttention
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.key_ranges import PackedCall
from diffusion_runtime.attention.backends.registry import register_backend


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    return flash_attn_func, flash_attn_varlen_func


@register_backend
class FlashAttention2(FlashAttention):
    """flash_attn.flash_attn_func. flash-attn-4 shares the name `flash_attn` and does not bring this function."""

    name = "fa2"
    not_replayed = None
    summary = "FlashAttention-2"
    distribution = "flash-attn"
    module = "flash_attn.flash_attn_interface"
    compiled_ahead = True
    functions = ("flash_attn_func", "flash_attn_varlen_func")
    install = "pip install flash-attn --no-build-isolation"
    capability = Capability(
        platforms=frozenset({"cuda", "rocm"}),
        dtypes=FLASH_DTYPES,
        head_sizes=HeadSizes(minimum=8, maximum=256, multiple=8),
        features=FLASH_FEATURES,
        minimum_capability=(8, 0),
    )

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> AttentionResult:
        result = _kernels()[0](q, k, v, softmax_scale=call.scale, causal=causal, return_attn_probs=call.return_lse)
        if not call.return_lse:
            return AttentionResult(result, None, "flash-attn")
        # Before 2.6 rows were rounded up to a multiple of 128.
        return AttentionResult(result[0], result[1][..., : q.shape[1]], "flash-attn")

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
            return_attn_probs=call.return_lse,
        )
        if not call.return_lse:
            return AttentionResult(result, None, "flash-attn varlen")
        lse = result[1]
        if lse.dim() == 3:
            # Before 2.6: [batch, heads, seq_q].
            lse = lse[..., : packed.seq_q].transpose(0, 1).flatten(1)
        return AttentionResult(result[0], lse, "flash-attn varlen")
