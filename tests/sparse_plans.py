"""Plans that no planner made: random selections over tiles, clusters and row masks, for tests of the kernels."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from diffusion_runtime.attention import SparsePlan, TokenLayout
from diffusion_runtime.attention.sparse.tiles import sequence_order, text_lengths, tile_geometry
from diffusion_runtime.core.block_geometry import BlockGeometry

Extent = tuple[int, int, int]


def random_selection(
    rows: int, num_q: int, num_kv: int, capacity: int, *, smallest: int = 1, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv_count, kv_index) of random lists of `smallest` to `capacity` blocks; what follows a count is nonsense."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.full((rows, num_q, capacity), 10**6, dtype=torch.int32)
    counts = torch.randint(smallest, capacity + 1, (rows, num_q), generator=generator).to(torch.int32)
    for row in range(rows):
        for block in range(num_q):
            listed = torch.randperm(num_kv, generator=generator)[: int(counts[row, block])]
            index[row, block, : len(listed)] = listed.sort().values.to(torch.int32)
    return counts, index


def tile_plan(
    layout: TokenLayout, tile: Extent, *, batch: int = 1, heads: int = 4, kv_heads: int = 2, smallest: int = 1
) -> SparsePlan:
    """Tiles that all heads share, with three different selections among the heads."""
    geometry = tile_geometry(layout, tile, "cpu")
    count = geometry.num_blocks
    kv_count, kv_index = random_selection(3, count, count, min(count, 5), smallest=smallest)
    return SparsePlan(
        method="tiles",
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        q=geometry,
        kv=geometry,
        group_of=(torch.arange(batch * heads) % 3).view(batch, heads).to(torch.int32),
        kv_count=kv_count,
        kv_index=kv_index,
        num_grid_tokens=layout.num_grid_tokens,
        text_lengths=text_lengths(layout, torch.device("cpu")),
    )


def cluster_plan(layout: TokenLayout, *, batch: int = 1, heads: int = 4, kv_heads: int = 2) -> SparsePlan:
    """Clusters of every head's own, with empty ones first, in the middle and last."""
    q, kv = _clusters(layout, batch * heads, 6, seed=1), _clusters(layout, batch * kv_heads, 9, seed=2)
    kv_count, kv_index = random_selection(batch * heads, q.num_blocks, kv.num_blocks, 7, smallest=4)
    return SparsePlan(
        method="clusters",
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        q=q,
        kv=kv,
        group_of=torch.arange(batch * heads).view(batch, heads).to(torch.int32),
        kv_count=kv_count,
        kv_index=kv_index,
        num_grid_tokens=layout.num_grid_tokens,
        text_lengths=text_lengths(layout, torch.device("cpu")),
    )


def row_mask_plan(
    layout: TokenLayout, tile: Extent, *, batch: int = 1, heads: int = 4, kv_heads: int = 2
) -> SparsePlan:
    """A tile plan in which every query drops some of the blocks that its block lists; some are left with none."""
    plan = tile_plan(layout, tile, batch=batch, heads=heads, kv_heads=kv_heads)
    words = -(-plan.kv.num_blocks // 32)
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(
        -(2**31), 2**31, (batch, heads, layout.num_grid_tokens, words), generator=generator, dtype=torch.int64
    )
    bits[:, :, :3] = 0
    return dataclasses.replace(plan, row_mask=bits.to(torch.int32))


def _clusters(layout: TokenLayout, groups: int, count: int, *, seed: int) -> BlockGeometry:
    generator = torch.Generator().manual_seed(seed)
    filled = torch.tensor([index for index in range(count) if index not in (0, count // 2, count - 1)])
    labels = filled[torch.randint(len(filled), (groups, layout.num_grid_tokens), generator=generator)]
    sizes = torch.zeros(groups, count, dtype=torch.int64).scatter_add_(1, labels, torch.ones_like(labels))
    order = labels.argsort(dim=1, stable=True)
    return BlockGeometry(
        order=sequence_order(layout.num_prefix_tokens, layout.num_suffix_tokens, order).to(torch.int32),
        offsets=F.pad(sizes.cumsum(1), (1, 0)).to(torch.int32),
        max_block_size=layout.num_grid_tokens,
    )
