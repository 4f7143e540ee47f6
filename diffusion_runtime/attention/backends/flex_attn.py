"""FlexAttention (Dong et al., arXiv:2412.05496): torch's compiled attention, on a CPU too.

It is always compiled: without that torch materialises the scores. The first call of a form compiles, some seconds on a
GPU and up to a minute on a CPU, and torch keeps the result on disk.

torch gives up on a function that it has compiled 8 times. That limit holds for the whole process and is left alone:
each form is a function of its own instead.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes, NarrowedCapability
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    CallForm,
)
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.masks import blank_hidden_rows, mask_feature
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import DTYPES, Hardware

_BLOCK = 128

_logger = logging.getLogger("diffusion_runtime.attention")
_compiled_forms: dict[tuple[object, ...], Callable[..., Any]] = {}


def _capability(features: frozenset[str]) -> Capability:
    return Capability(
        platforms=frozenset({"cpu", "cuda", "rocm"}),
        dtypes=frozenset(DTYPES),
        head_sizes=HeadSizes(minimum=16, maximum=256),
        features=features,
        minimum_capability=(8, 0),
    )


_ON_GPU = _capability(
    frozenset(
        {"key_padding", "gqa", "causal", "scale", "lse", "boolean_mask", "additive_mask", "block_mask", "cached_keys"}
    )
)
# torch's CPU code returns no log-sum-exp, and what it generates for a mask of lengths that change does not compile.
_ON_CPU = _capability(_ON_GPU.features - {"lse", "boolean_mask", "additive_mask", "block_mask"})


def _on(hardware: Hardware) -> Capability:
    return _ON_CPU if hardware.platform == "cpu" else _ON_GPU


@register_backend
class FlexBackend(Backend):
    """torch.compile(flex_attention); a mask in general is a modification of the scores, since its values are data."""

    name = "flex_attn"
    not_replayed = "its block masks are made once per request"
    summary = "torch's FlexAttention, compiled"
    self_check_platforms = frozenset()
    capability = NarrowedCapability(
        platforms=_ON_GPU.platforms,
        dtypes=_ON_GPU.dtypes,
        head_sizes=_ON_GPU.head_sizes,
        features=_ON_GPU.features,
        minimum_capability=_ON_GPU.minimum_capability,
        narrow=_on,
    )

    def probe(self, hardware: Hardware) -> Availability:
        if hardware.platform == "cpu" and not {"g++", "clang++"} & hardware.programs:
            return Availability(None, "it is compiled, and there is no C++ compiler here", "apt-get install g++")
        if hardware.platform != "cpu" and "triton" not in hardware.packages:
            return Availability(None, "it is compiled with triton, which is not installed", "pip install triton")
        return Availability(hardware.torch_version)

    def timed_by_default(self, hardware: Hardware) -> bool:
        return hardware.platform != "cpu"

    def compiles_at_first_call(self, hardware: Hardware) -> bool:  # noqa: ARG002
        return True

    def expected_implementation(self, form: CallForm) -> str | None:  # noqa: ARG002
        return "flex"

    def gradient_refusal(self, call: AttentionCall) -> str | None:
        return "torch's FlexAttention has no backward pass on a CPU" if call.q.device.type == "cpu" else None

    def run(self, call: AttentionCall) -> AttentionResult:
        if call.block_mask is not None:
            return _attend(call, call.q, call.k, call.v, False)
        return attend_by_ranges(call, _attend)


def _flex(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | None,
    scale: float | None,
    kernel_options: dict[str, Any] | None,
    enable_gqa: bool,
    return_lse: bool,
) -> Any:
    attend: Callable[..., Any] = flex_attention
    return attend(
        q_bhsd,
        k_bhsd,
        v_bhsd,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        kernel_options=kernel_options,
        enable_gqa=enable_gqa,
        return_aux=AuxRequest(lse=True) if return_lse else None,
    )


def _compile(device_type: str) -> Callable[..., Any]:
    """`_flex` with a code object of its own, by which torch counts compilations."""
    own = types.FunctionType(_flex.__code__.replace(), globals())
    # On a CPU a compilation takes longer than most calls, so one serves every length.
    return torch.compile(own, fullgraph=True, dynamic=True if device_type == "cpu" else None)


def _call_compiled(form: tuple[object, ...], device_type: str, *arguments: Any) -> Any:
    if form not in _compiled_forms:
        _compiled_forms[form] = _compile(device_type)
    try:
        return _compiled_forms[form](*arguments)
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        # More kinds of lengths than the process's limit admits: begin again, from what torch kept on disk.
        _compiled_forms[form] = _compile(device_type)
        return _compiled_forms[form](*arguments)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    mask = call.mask
    kind = None if mask is None else mask_feature(mask)
    form = (q.device, q.dtype, q.shape[3], q.shape[2], k.shape[2], causal, call.return_lse, kind)
    if form not in _compiled_forms:
        wait = "up to a minute" if q.device.type == "cpu" else "some seconds"
        _logger.info("flex_attn compiles for head_dim %d, %s: %s, once", q.shape[3], q.dtype, wait)
    result = _call_compiled(
        form,
        q.device.type,
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None if mask is None else masking(mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])),
        call.state.request.compute_once(causal_blocks, q.shape[1], q.device) if causal else call.block_mask,
        call.scale,
        None if call.block_mask is None else _tiles_within(call.block_mask, q.dtype),
        q.shape[2] != k.shape[2],
        call.return_lse,
    )
    if not call.return_lse:
        return blank_hidden_rows(AttentionResult(result.transpose(1, 2), None, "flex"), mask)
    return blank_hidden_rows(AttentionResult(result[0].transpose(1, 2), result[1].lse.float(), "flex"), mask)


def _tiles_within(blocks: BlockMask, dtype: torch.dtype) -> dict[str, Any] | None:
    """Tile sizes for blocks that torch's own do not divide, as those of NABLA with 64 tokens."""
    rows, columns = blocks.BLOCK_SIZE
    usual_rows, usual_columns = (64 if dtype == torch.float32 else 128), 64
    tiles = {} if rows % usual_rows == 0 else {"BLOCK_M": rows}
    tiles |= {} if columns % usual_columns == 0 else {"BLOCK_N": columns}
    return tiles or None


def masking(mask: torch.Tensor) -> Callable[..., Any]:
    """The score modification of a mask [batch, heads, seq_q, seq_k]: hide where it is False, or add it."""
    if mask.dtype == torch.bool:

        def hide(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
            return torch.where(mask[batch, head, query, key], score, float("-inf"))

        return hide

    def add(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + mask[batch, head, query, key]

    return add


def _is_not_later(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
    return query >= key


def causal_blocks(seq: int, device: torch.device) -> BlockMask:
    """Causal attention as blocks: those below the diagonal are full, those on it are masked.

    Written down at once: torch's own constructor evaluates a [seq, seq] mask.
    """
    rows = -(-seq // _BLOCK)
    index = torch.arange(rows, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        kv_num_blocks=torch.ones_like(index)[None, None],
        kv_indices=torch.cat([index[:, None], index.expand(rows, -1)[:, 1:]], dim=1)[None, None].contiguous(),
        full_kv_num_blocks=index[None, None],
        full_kv_indices=index.expand(rows, -1)[None, None].contiguous(),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_is_not_later,
        seq_lengths=(seq, seq),
    )
