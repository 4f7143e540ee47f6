"""Chunks of V-MoBA: how a layer cuts the grid into chunks of keys.

arXiv:2506.23858, section 3: layers take turns with chunks in time, in space and in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diffusion_runtime.attention.sparse.tiles import order_geometry, tile_counts, tile_order
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry

# So many consecutive tokens in raster order, or a tile (frames, height, width); the last chunk holds what is left.
ChunkShape = int | Extent

# Queries of a block share the list of the chunks that any of them selected, so a block is a kernel's tile of rows.
NUM_QUERIES_IN_BLOCK = 128


@dataclass(frozen=True)
class Chunks:
    """S grid tokens in the order of the chunks.

    kv: the chunks; q: the same order in blocks of at most NUM_QUERIES_IN_BLOCK tokens, each inside one chunk.
    chunk_of_row: int64 [S], the chunk of each position of the order.
    """

    kv: BlockGeometry
    q: BlockGeometry
    chunk_of_row: torch.Tensor

    @property
    def num_chunks(self) -> int:
        return self.kv.num_blocks


def chunk_count(grid: Extent, shape: ChunkShape) -> int:
    """How many chunks a grid has."""
    return -(-math.prod(grid) // shape) if isinstance(shape, int) else math.prod(tile_counts(grid, shape))


def chunks_of(layout: TokenLayout, shape: ChunkShape, device: torch.device) -> Chunks:
    """The chunks of a layout's grid."""
    if isinstance(shape, int):
        total = layout.num_grid_tokens
        order = torch.arange(total, device="cpu")
        sizes_of_chunks = torch.tensor([min(shape, total - start) for start in range(0, total, shape)], device="cpu")
    else:
        order, sizes_of_chunks = tile_order(layout.grid, shape)
    kv = order_geometry(layout, order, sizes_of_chunks)
    sizes = []
    for size in kv.sizes[0].tolist():
        whole, rest = divmod(size, NUM_QUERIES_IN_BLOCK)
        sizes += [NUM_QUERIES_IN_BLOCK] * whole + [rest] * (rest > 0)
    q = order_geometry(layout, order, torch.tensor(sizes, device="cpu"))
    return Chunks(
        kv=kv.to(device),
        q=q.to(device),
        chunk_of_row=torch.repeat_interleave(kv.sizes[0].long()).to(device),
    )
