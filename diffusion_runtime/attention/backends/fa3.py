"""FlashAttention-3 (Shah et al., arXiv:2407.08608): package flash-attn-3, built from source, sm_90 alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes
from diffusion_runtime.attention.backends.flash_attention import (
    FLASH_DTYPES,
    FLASH_FEATURES,
    FlashAttention,
    codes_refusal,
    lengths_of,
)
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.key_ranges import PackedCall
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.backends.stored import StoredKeysReader
from diffusion_runtime.attention.cache.stored import PageFormat, StoredKeys


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return _with_lse(flash_attn_func), _with_lse(flash_attn_varlen_func)


def _with_lse(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in the form that returns (out, lse): early builds always do, later ones when asked to."""
    if "return_attn_probs" in inspect.signature(function).parameters:
        return functools.partial(function, return_attn_probs=True)
    return function


@functools.cache
def _paged_kernel() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_with_kvcache

    function: Callable[..., Any] = flash_attn_with_kvcache
    return function


@register_backend
class FlashAttention3(FlashAttention, StoredKeysReader):
    """flash_attn_interface.flash_attn_func; its kernel always writes the log-sum-exp. Stored pages are read by
    flash_attn_with_kvcache."""

    name = "fa3"
    not_replayed = None
    summary = "FlashAttention-3"
    distribution = "flash-attn-3"
    module = "flash_attn_interface"
    compiled_ahead = True
    functions = ("flash_attn_func", "flash_attn_varlen_func")
    install = (
        "git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && python setup.py install"
    )
    capability = Capability(
        platforms=frozenset({"cuda"}),
        dtypes=FLASH_DTYPES,
        head_sizes=HeadSizes(minimum=8, maximum=256, multiple=8),
        features=FLASH_FEATURES,
        minimum_capability=(9, 0),
        maximum_capability=(9, 0),
    )

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> AttentionResult:
        out, lse = _kernels()[0](q, k, v, softmax_scale=call.scale, causal=causal)[:2]
        return AttentionResult(out, lse if call.return_lse else None, "flash-attn-3")

    def attend_packed(self, call: AttentionCall, packed: PackedCall) -> AttentionResult:
        out, lse = _kernels()[1](
            packed.q,
            packed.k,
            packed.v,
            packed.q_offsets,
            packed.k_offsets,
            packed.seq_q,
            packed.max_length,
            softmax_scale=call.scale,
        )[:2]
        return AttentionResult(out, lse if call.return_lse else None, "flash-attn-3 varlen")

    def stored_refusal(self, form: PageFormat, device: torch.device) -> str | None:  # noqa: ARG002
        return codes_refusal(form)

    def run_stored(self, call: AttentionCall, stored: StoredKeys) -> AttentionResult:
        out, lse = _paged_kernel()(
            call.q,
            stored.keys,
            stored.values,
            cache_seqlens=lengths_of(call, stored),
            page_table=stored.page_table,
            softmax_scale=call.scale,
            return_softmax_lse=True,
        )[:2]
        return AttentionResult(out, lse if call.return_lse else None, "flash-attn-3 paged")
