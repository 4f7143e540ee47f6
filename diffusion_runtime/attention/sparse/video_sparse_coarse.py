"""The coarse branch of Video Sparse Attention: attention among the means of tiles, and the tiles it prefers.

arXiv:2505.13389, section 2. Scores of tiles are not weighted by how many tokens a tile holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diffusion_runtime.kernels.block_means.api import block_means
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry
from diffusion_runtime.kernels.highest_blocks.api import highest

# Scores of tiles that are held in float32 at a time.
_CHUNK = 1 << 25


@dataclass(frozen=True)
class TileMeans:
    """float32 [B, heads, N, head_dim]; v: None where the selection alone is wanted."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None


@dataclass(frozen=True)
class CoarseResult:
    """B batch, H query heads, N tiles.

    kept: int32 [B, H, N, num_kept], the key tiles of each query tile, ascending; None when none were asked for.
    pooled: float32 [B, H, N, head_dim], what attention among tiles gives each; None without values.
    """

    kept: torch.Tensor | None
    pooled: torch.Tensor | None


def num_kept_tiles(sparsity: float, num_tiles: int) -> int:
    """How many key tiles a query tile keeps: the share 1 - sparsity, rounded up, at least one."""
    # (1 - 0.7) * 10 is a little more than 3 in floating point, and must not become 4.
    return min(max(math.ceil((1.0 - sparsity) * num_tiles - 1e-6), 1), num_tiles)


def tile_means(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, geometry: BlockGeometry) -> TileMeans:
    """q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; geometry: the tiles, shared by all heads."""
    v_means = None if v is None else block_means(v, geometry)
    return TileMeans(block_means(q, geometry), block_means(k, geometry), v_means)


def attend_tiles(means: TileMeans, *, scale: float, num_kept: int | None) -> CoarseResult:
    """Attention among tiles' means in float32.

    num_kept: key tiles to keep for each query tile; None for the pooled values alone.
    """
    q_means, k_means, v_means = means.q, means.k, means.v
    batch, num_heads, num_tiles, head_dim = q_means.shape
    repeats = num_heads // k_means.shape[1]
    kept = None
    if num_kept is not None:
        kept = torch.empty(batch, num_heads, num_tiles, num_kept, dtype=torch.int32, device=q_means.device)
    pooled = None if v_means is None else torch.empty_like(q_means)
    step = max(1, _CHUNK // (num_tiles * num_tiles * repeats))
    for sample in range(batch):
        for start in range(0, k_means.shape[1], step):
            kv_heads = slice(start, min(start + step, k_means.shape[1]))
            heads = slice(kv_heads.start * repeats, kv_heads.stop * repeats)
            # Query heads that share a key head stand below each other, so that keys are not repeated.
            stacked = q_means[sample, heads].reshape(-1, repeats * num_tiles, head_dim)
            scores = scale * stacked @ k_means[sample, kv_heads].transpose(1, 2)
            if kept is not None and num_kept is not None:
                kept[sample, heads] = highest(scores, num_kept).view(-1, num_tiles, num_kept)
            if pooled is not None and v_means is not None:
                values = scores.softmax(dim=-1) @ v_means[sample, kv_heads]
                pooled[sample, heads] = values.view(-1, *pooled.shape[2:])
    return CoarseResult(kept, pooled)
