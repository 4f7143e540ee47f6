"""Chunk selection in Triton for groups of one query: gates and selection in one pass, no gate leaves a program."""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.block_sparse.triton import is_interpreted, refusal_of_size

# Chunks whose gates a program holds for 16 queries.
MAXIMUM_CHUNKS = 1024


def refusal(q: torch.Tensor, means: torch.Tensor, group: str) -> str | None:
    """Return why this implementation cannot select chunks for tensors like q, or None."""
    if group != "query_head":
        return f"compares the chunks of one query (query_head), not {group}"
    if means.shape[2] > MAXIMUM_CHUNKS:
        return f"takes up to {MAXIMUM_CHUNKS} chunks, not {means.shape[2]}"
    return refusal_of_size(q, q.shape[1])


def chunk_row_mask_triton(
    q: torch.Tensor,
    means: torch.Tensor,
    order: torch.Tensor,
    chunk_of_row: torch.Tensor,
    *,
    top: int | None,
    threshold: float,
) -> torch.Tensor:
    """Implement chunk_row_mask for the group query_head."""
    import triton.language as tl

    from diffusion_runtime.kernels.chunk_selection import triton_kernels as kernels

    q = q if q.stride(3) == 1 else q.contiguous()
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads, num_chunks = means.shape[1:3]
    num_rows, words = chunk_of_row.shape[0], -(-num_chunks // 32)
    row_mask = torch.empty(batch, num_heads, num_rows, words, dtype=torch.int32, device=q.device)
    chunks = max(32, 1 << (num_chunks - 1).bit_length())
    by_share = top is None
    # Gates that a thread holds: 64, or 32 next to sums in float64; more of them do not fit the registers of sm_90.
    rows = max(16, min(64, (8192 if by_share else 16384) // chunks))
    num_warps = max(4, rows * chunks // (1024 if by_share else 2048))
    kernels.select_rows[(-(-num_rows // rows), batch * num_heads)](
        q,
        means.contiguous(),
        order,
        chunk_of_row,
        row_mask,
        num_rows,
        num_chunks,
        num_heads,
        num_heads // num_kv_heads,
        words,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        0 if top is None else top - 1,
        D=head_dim,
        DIMS=max(16, min(32, 8192 // chunks)),
        ROWS=rows,
        CHUNKS=chunks,
        BY_SHARE=by_share,
        THRESHOLD=float(threshold),
        SPLIT=q.dtype == torch.bfloat16,
        # The interpreter multiplies the bit patterns of bfloat16.
        FACTOR=tl.float32 if is_interpreted() else tl.bfloat16,
        num_warps=num_warps,
    )
    return row_mask
