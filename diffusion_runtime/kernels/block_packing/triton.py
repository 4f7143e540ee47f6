"""Packing in Triton: one launch and one pass over q, k and v."""

from __future__ import annotations

import os

import torch

from diffusion_runtime.kernels.block_packing.reference import TAIL_ROWS, Averaged, PackedTokens, row_width
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry


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
    from diffusion_runtime.kernels.block_packing import triton_kernels as kernels

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
    from diffusion_runtime.kernels.block_packing import triton_kernels as kernels

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
