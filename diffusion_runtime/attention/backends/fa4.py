"""FlashAttention-4: package flash-attn-4, pure Python, compiled by CuTe at the first call; sm_90 and newer.

What it compiles depends on dtypes, head sizes, heads per key head, causality, the log-sum-exp and the varlen form, and
not on lengths, but for whether all queries fit one tile. Each process compiles again, unless
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps the kernels on disk.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes, NarrowedCapability
from diffusion_runtime.attention.backends.flash_attention import (
    FLASH_DTYPES,
    FLASH_FEATURES,
    FlashAttention,
    codes_refusal,
    lengths_of,
)
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, CallForm
from diffusion_runtime.attention.backends.key_ranges import PackedCall
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.backends.split_kv import attend_split, can_split, plan_split
from diffusion_runtime.attention.backends.stored import StoredKeysReader
from diffusion_runtime.attention.cache.stored import PageFormat, StoredKeys
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.startup.first_use import count_kernel

_logger = logging.getLogger("diffusion_runtime.attention")
_compiled: set[tuple[object, ...]] = set()
# Queries of one tile of the package's kernel for sm_90, of these head sizes: one multiprocessor computes one at a time.
_TILE = 128
_TILED_BY_128 = range(97, 129)
_SPLITTING_CAPABILITY = (9, 0)
# Of an H20, an H100 with PCIe, and an H100 with SXM or an H200.
_HOPPER_PROCESSORS = (78, 114, 132)


@functools.cache
def _kernels() -> tuple[Callable[..., Any], ...]:
    return FlashAttention4().first_call_functions()


@contextmanager
def _first_compiled(
    q: torch.Tensor, k: torch.Tensor, form: str, *, return_lse: bool, causal: bool = False
) -> Iterator[None]:
    """Around a call: a first one of its kind compiles for seconds, which look like a hang, so it is announced and
    counted."""
    q_shape = q.shape
    key = (q.device, q.dtype, q_shape[-1], q_shape[-2] // k.shape[-2], causal, return_lse, form)
    if key in _compiled:
        yield
        return
    _compiled.add(key)
    _logger.info(
        "flash-attn-4 compiles its %s kernel for head_dim %d, %s: some seconds, once", form, q_shape[-1], q.dtype
    )
    started = time.perf_counter()
    yield
    count_kernel(time.perf_counter() - started)


def _capability(head_sizes: HeadSizes) -> Capability:
    return Capability(
        platforms=frozenset({"cuda"}),
        dtypes=FLASH_DTYPES,
        head_sizes=head_sizes,
        features=FLASH_FEATURES,
        minimum_capability=(9, 0),
        maximum_capability=(12, 1),
    )


_UP_TO_256 = _capability(HeadSizes(minimum=8, maximum=256, multiple=8))
_UP_TO_128_AND_256 = _capability(HeadSizes(only=(*range(8, 129, 8), 256)))
# sm_120 and sm_121 have 99 KB of shared memory; the package's tiles for heads of 128 take 64 of them.
_UP_TO_128 = _capability(HeadSizes(minimum=8, maximum=128, multiple=8))


def _on(hardware: Hardware) -> Capability:
    if hardware.capability is None or hardware.capability < (10, 0):
        return _UP_TO_256
    return _UP_TO_128_AND_256 if hardware.capability < (12, 0) else _UP_TO_128


@register_backend
class FlashAttention4(FlashAttention, StoredKeysReader):
    """flash_attn.cute.flash_attn_func: kernels of their own for sm_90 and sm_100, those of sm_80 on sm_120. The first
    two read stored pages, by TMA where a page is one of their tiles of keys and with plain copies otherwise."""

    name = "fa4"
    not_replayed = None
    summary = "FlashAttention-4 (CuTe)"
    distribution = "flash-attn-4"
    module = "flash_attn.cute"
    functions = ("flash_attn_func", "flash_attn_varlen_func")
    install = "pip install 'diffusion-runtime[flash]'"
    capability = NarrowedCapability(
        platforms=_UP_TO_256.platforms,
        dtypes=_UP_TO_256.dtypes,
        head_sizes=_UP_TO_256.head_sizes,
        features=_UP_TO_256.features,
        minimum_capability=_UP_TO_256.minimum_capability,
        maximum_capability=_UP_TO_256.maximum_capability,
        narrow=_on,
    )

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> AttentionResult:
        num_processors = None if causal else _processors_of_known_tiles(q, k)
        if num_processors is None:
            return AttentionResult(*_attend_dense(call, q, k, v, call.return_lse, causal=causal), "flash-attn-4")
        batch, num_queries, num_heads, _ = q.shape
        split = None
        if can_split(k, v):
            split = plan_split(num_queries, k.shape[1], batch * num_heads, _TILE, num_processors)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """With the log-sum-exp whether it is asked for or not: a stream whose window fills, and whose keys are cut
            from then on, is not to wait for a second kernel to be compiled."""
            out, lse = _attend_dense(call, q, k, v, True)
            assert lse is not None, "it was asked for"
            return out, lse

        out, lse = attend(q, k, v) if split is None else attend_split(split, q, k, v, attend)
        name = "flash-attn-4" if split is None else "flash-attn-4 split-KV"
        return AttentionResult(out, lse if call.return_lse else None, name)

    def expected_implementation(self, form: CallForm) -> str | None:
        """None where it depends on the chip's multiprocessors whether keys are cut."""
        batch, num_queries, num_heads, head_dim = form.q_shape
        is_split = (
            form.hardware.capability == _SPLITTING_CAPABILITY
            and not form.causal
            and head_dim in _TILED_BY_128
            and form.k_shape[2] == num_heads
            and any(plan_split(num_queries, form.k_shape[1], batch * num_heads, _TILE, n) for n in _HOPPER_PROCESSORS)
        )
        return None if is_split else super().expected_implementation(form)

    def attend_packed(self, call: AttentionCall, packed: PackedCall) -> AttentionResult:
        with _first_compiled(packed.q, packed.k, "varlen", return_lse=call.return_lse):
            result = _kernels()[1](
                packed.q,
                packed.k,
                packed.v,
                cu_seqlens_q=packed.q_offsets,
                cu_seqlens_k=packed.k_offsets,
                max_seqlen_q=packed.seq_q,
                max_seqlen_k=packed.max_length,
                softmax_scale=call.scale,
                return_lse=call.return_lse,
            )
        return AttentionResult(*_out_and_lse(result, call.return_lse), "flash-attn-4 varlen")

    def stored_refusal(self, form: PageFormat, device: torch.device) -> str | None:
        capability = detect_hardware(str(device)).capability
        if capability is not None and capability >= (12, 0):
            return f"it has no kernel for pages on sm_{capability[0]}{capability[1]}"
        return codes_refusal(form)

    def run_stored(self, call: AttentionCall, stored: StoredKeys) -> AttentionResult:
        with _first_compiled(call.q, stored.keys, "paged", return_lse=call.return_lse):
            result = _kernels()[1](
                call.q,
                stored.keys,
                stored.values,
                max_seqlen_q=call.q.shape[1],
                max_seqlen_k=stored.form.num_keys,
                seqused_k=lengths_of(call, stored),
                page_table=stored.page_table,
                softmax_scale=call.scale,
                return_lse=call.return_lse,
            )
        return AttentionResult(*_out_and_lse(result, call.return_lse), "flash-attn-4 paged")


def _attend_dense(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One call of the kernel. call: its scale alone is read."""
    with _first_compiled(q, k, "dense", return_lse=return_lse, causal=causal):
        result = _kernels()[0](q, k, v, softmax_scale=call.scale, causal=causal, return_lse=return_lse)
    return _out_and_lse(result, return_lse)


def _processors_of_known_tiles(q: torch.Tensor, k: torch.Tensor) -> int | None:
    """Multiprocessors of a device on which the kernel's tiles are known; None on others, for other head sizes and for
    grouped queries, of which it packs several heads into a tile."""
    num_heads, head_dim = q.shape[2:]
    return _processors_of(q.device) if head_dim in _TILED_BY_128 and k.shape[2] == num_heads else None


@functools.cache
def _processors_of(device: torch.device) -> int | None:
    """Multiprocessors of a device whose kernel gives each of them one tile at a time; None for others."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _SPLITTING_CAPABILITY:
        return None
    return torch.cuda.get_device_properties(device).multi_processor_count


def _out_and_lse(result: Any, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Versions differ in whether a call that asks for no log-sum-exp returns out or (out, None)."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out, lse if return_lse else None
