"""The specification of block means, in torch: each block is summed on its own, in order, in float32."""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry

# How many numbers are gathered in float32 at a time.
_CHUNK = 1 << 25


def block_means_reference(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """x: [B, seq, heads, head_dim]. Returns [B, heads, blocks, head_dim], float32; an empty block gives 0."""
    batch, num_tokens, num_heads, head_dim = x.shape
    means = torch.empty(batch, num_heads, geometry.num_blocks, head_dim, dtype=torch.float32, device=x.device)
    step = max(1, _CHUNK // max(1, num_tokens * head_dim))
    for sample in range(batch):
        for start in range(0, num_heads, step):
            heads = slice(start, min(start + step, num_heads))
            first = sample * num_heads
            rows = slice(0, 1) if geometry.num_groups == 1 else slice(first + heads.start, first + heads.stop)
            means[sample, heads] = _means_of_rows(
                x[sample, :, heads].transpose(0, 1), geometry.order[rows], geometry.offsets[rows]
            )
    return means


def _means_of_rows(x: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x: [n, seq, head_dim]; order, offsets: [1 or n, ...]. Returns [n, blocks, head_dim]."""
    index = order.long()[..., None].expand(x.shape[0], -1, x.shape[2])
    # Each segment is summed by itself: running totals would carry one NaN into every later block, and atomic additions
    # would make two runs differ.
    sums = torch.segment_reduce(
        x.gather(1, index).float(),
        "sum",
        offsets=offsets.long().expand(x.shape[0], -1).contiguous(),
        axis=1,
        unsafe=True,
        initial=0,
    )
    return sums / offsets.diff(dim=1).clamp(min=1)[..., None]
