"""Packing into block order: q, k and v as rows in the order of their blocks, in one pass by Triton, or by the
specification in torch."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.packed_tokens import TAIL_ROWS, PackedTokens
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_means import block_means_reference

# The tensors whose block means are computed, by their names.
Averaged = Literal["none", "k", "kv", "qk", "qkv"]


class TokenBlocks(NamedTuple):
    """The blocks that a sparse layer's next call reads, where its tokens stand in their order already; arguments of
    pack_tokens.

    geometry: of q and of k and v, `is_identity`; num_grid_tokens, text_lengths: as there; averaged: which parts' block
    means are read.
    """

    geometry: BlockGeometry
    num_grid_tokens: int
    text_lengths: torch.Tensor | None
    averaged: Averaged


def row_width(head_dim: int) -> int:
    """Columns of a packed row: a power of two, and at least the smallest that a matrix unit accepts."""
    return max(16, 1 << (head_dim - 1).bit_length())


def pack_tokens_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_geometry: BlockGeometry,
    kv_geometry: BlockGeometry,
    *,
    num_grid_tokens: int,
    text_lengths: torch.Tensor | None,
    averaged: Averaged,
) -> PackedTokens:
    """Implement pack_tokens in torch."""
    return PackedTokens(
        _pack(q, q_geometry, num_grid_tokens, text_lengths),
        _pack(k, kv_geometry, num_grid_tokens, text_lengths),
        _pack(v, kv_geometry, num_grid_tokens, text_lengths),
        q_geometry,
        kv_geometry,
        block_means_reference(q, q_geometry) if "q" in averaged else None,
        block_means_reference(k, kv_geometry) if "k" in averaged else None,
        block_means_reference(v, kv_geometry) if "v" in averaged else None,
    )


def _pack(
    x: torch.Tensor, geometry: BlockGeometry, num_grid_tokens: int, text_lengths: torch.Tensor | None
) -> torch.Tensor:
    """x: [B, N, heads, head_dim]. Returns [B * heads * N + TAIL_ROWS, W]."""
    batch, num_tokens, num_heads, head_dim = x.shape
    rows = x.transpose(1, 2).reshape(batch * num_heads, num_tokens, head_dim)
    rows = rows.gather(1, geometry.order.long().expand(len(rows), -1)[..., None].expand_as(rows))
    if text_lengths is not None:
        positions = torch.arange(num_tokens, device=x.device)
        padded = positions >= num_grid_tokens + text_lengths.repeat_interleave(num_heads)[:, None]
        rows = rows.masked_fill(padded[..., None], 0.0)
    return torch.nn.functional.pad(rows.flatten(0, 1), (0, row_width(head_dim) - head_dim, 0, TAIL_ROWS))


def pack_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_geometry: BlockGeometry,
    kv_geometry: BlockGeometry,
    *,
    num_grid_tokens: int,
    text_lengths: torch.Tensor | None = None,
    averaged: Averaged = "none",
) -> PackedTokens:
    """q, k and v as rows in the order of their blocks, and the means of the blocks from the same pass.

    q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; the geometries are shared by all heads or have one row
    per head. text_lengths: int32 [B], how many text tokens are valid; None for all. averaged: which of the tensors get
    block means, summed in float32. Deterministic, and without a device synchronisation.

    Raises ConfigError when the tensors do not fit the geometries.
    """
    for name, x, geometry in (("q", q, q_geometry), ("k", k, kv_geometry), ("v", v, kv_geometry)):
        groups = x.shape[0] * x.shape[2]
        if x.shape[1] != geometry.num_tokens or geometry.num_groups not in (1, groups) or x.dtype != q.dtype:
            raise ConfigError(
                f"packing: expected {name} [batch, {geometry.num_tokens}, heads, head_dim] of {q.dtype} with batch * "
                f"heads {'of any number' if geometry.num_groups == 1 else geometry.num_groups}, got {tuple(x.shape)} "
                f"of {x.dtype}"
            )
    if k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ConfigError(
            f"packing: expected k and v of one shape, with q's batch and head_dim, got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    pack = pack_tokens_reference if refusal(q) is not None else pack_tokens_triton
    return pack(
        q,
        k,
        v,
        q_geometry,
        kv_geometry,
        num_grid_tokens=num_grid_tokens,
        text_lengths=text_lengths,
        averaged=averaged,
    )


def refusal(x: torch.Tensor) -> str | None:
    """Return why this implementation cannot pack tensors like x, or None."""
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the tensor is on {x.device}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, not {x.dtype}"
    return None


def pack_tokens_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_geometry: BlockGeometry,
    kv_geometry: BlockGeometry,
    *,
    num_grid_tokens: int,
    text_lengths: torch.Tensor | None,
    averaged: Averaged,
) -> PackedTokens:
    """Implement pack_tokens in Triton."""
    from diffusion_runtime.kernels import block_packing_triton as kernels

    q, k, v = (rows_contiguous(x) for x in (q, k, v))
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, width = k.shape[2], row_width(head_dim)
    rows = [x.new_empty(batch * x.shape[2] * num_tokens + TAIL_ROWS, width) for x in (q, k, v)]
    geometries = (q_geometry, kv_geometry, kv_geometry)
    means = [
        torch.empty(batch, x.shape[2], geometry.num_blocks, head_dim, dtype=torch.float32, device=x.device)
        if name in averaged
        else None
        for name, x, geometry in zip("qkv", (q, k, v), geometries, strict=True)
    ]
    # Runs are blocks and then text, so that one program reads a whole block; without means any runs will do.
    run = min(64, 8192 // width)
    by_blocks = averaged != "none"
    num_blocks = max(q_geometry.num_blocks, kv_geometry.num_blocks) if by_blocks else 0
    num_runs = num_blocks + -(-(num_tokens - (num_grid_tokens if by_blocks else 0)) // run)
    kernels.pack_heads[(num_runs * batch * (num_heads + 2 * num_kv_heads),)](
        q,
        k,
        v,
        *rows,
        *(q if each is None else each for each in means),
        q_geometry.order,
        q_geometry.offsets,
        kv_geometry.order,
        kv_geometry.offsets,
        q_geometry.order if text_lengths is None else text_lengths,
        batch,
        num_heads,
        num_kv_heads,
        num_tokens,
        num_grid_tokens,
        q_geometry.num_blocks,
        kv_geometry.num_blocks,
        *_group_strides(q_geometry),
        *_group_strides(kv_geometry),
        *(x.stride(axis) for x in (q, k, v) for axis in range(3)),
        D=head_dim,
        W=width,
        RUN=run,
        TAIL=TAIL_ROWS,
        HAS_LENGTHS=text_lengths is not None,
        BY_BLOCKS=by_blocks,
        AVERAGE_Q=means[0] is not None,
        AVERAGE_K=means[1] is not None,
        AVERAGE_V=means[2] is not None,
        num_warps=4,
    )
    return PackedTokens(rows[0], rows[1], rows[2], q_geometry, kv_geometry, *means)


def _group_strides(geometry: BlockGeometry) -> tuple[int, int]:
    """Strides from one head to the next in `order` and in `offsets`."""
    return (0, 0) if geometry.num_groups == 1 else (geometry.num_tokens, geometry.num_blocks + 1)


def reorder_tokens(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x [B, N, heads, D] with token order[p] at position p; order: int32 [N]; D is a power of two."""
    from diffusion_runtime.kernels import block_packing_triton as kernels

    batch, num_rows, num_heads, head_dim = x.shape
    x, run = rows_contiguous(x), 64
    moved = x.new_empty(x.shape)
    kernels.reorder_rows[(-(-num_rows // run), batch * num_heads)](
        x,
        order,
        moved,
        num_rows,
        num_heads,
        *x.stride()[:3],
        *moved.stride()[:3],
        D=head_dim,
        RUN=run,
    )
    return moved


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x [B, N, heads, D] with the values of a head side by side, as the kernels read them."""
    return x if x.stride(3) == 1 else x.contiguous()
