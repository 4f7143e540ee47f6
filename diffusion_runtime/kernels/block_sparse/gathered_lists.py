"""Positions of the gathered queries of each key block: lists one after the other, cut into tiles; no size is read back.

A call has one list per head and key block, of the queries that see the block, in the order of the query blocks. Built
from single torch operations it takes 18 launches per unit of heads; a call at 32,760 tokens has two units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffusion_runtime.kernels.block_sparse import triton

# Numbers that a program reads at a time.
LARGEST_STEP = 1024


class GatheredLists(NamedTuple):
    """L lists, B query blocks, T tiles; int32.

    bases: [L, B], the first entry of each query block's queries in each list. stops: [L], behind the last entry of each
    list. tile_lists: [T], the list of each tile; tile_starts: [T], its first entry, where it begins. Tiles past the
    last one belong to the last list and begin behind it.
    """

    bases: torch.Tensor
    stops: torch.Tensor
    tile_lists: torch.Tensor
    tile_starts: torch.Tensor


def gathered_lists(counts: torch.Tensor, rows: int, num_tiles: int) -> GatheredLists:
    """counts: int32 [heads, B, key blocks], how many queries of a query block see a key block; any strides. rows: of a
    tile. num_tiles: at least as many as there are, since their number is not read."""
    if triton.refusal_of_device(counts) is None:
        return gathered_lists_triton(counts, rows, num_tiles)
    return gathered_lists_reference(counts, rows, num_tiles)


def gathered_lists_reference(counts: torch.Tensor, rows: int, num_tiles: int) -> GatheredLists:
    """Implement gathered_lists in torch."""
    num_blocks = counts.shape[1]
    by_list = counts.transpose(1, 2).reshape(-1, num_blocks)
    ends = by_list.flatten().cumsum(0, dtype=torch.int32).view(by_list.shape)
    bases = ends - by_list
    starts, stops = bases[:, 0], ends[:, -1].contiguous()
    tile_ends = ((stops - starts + rows - 1) // rows).cumsum(0, dtype=torch.int32)
    tiles = torch.arange(num_tiles, dtype=torch.int32, device=counts.device)
    tile_lists = torch.searchsorted(tile_ends, tiles, right=True, out_int32=True)
    is_tile = tile_lists < len(stops)
    tile_lists.clamp_(max=len(stops) - 1)
    before = torch.nn.functional.pad(tile_ends, (1, 0))[tile_lists.long()]
    tile_starts = starts[tile_lists.long()] + (tiles - before) * rows
    return GatheredLists(bases, stops, tile_lists, torch.where(is_tile, tile_starts, stops[-1]))


def gathered_lists_triton(counts: torch.Tensor, rows: int, num_tiles: int) -> GatheredLists:
    """Implement gathered_lists in two launches."""
    from diffusion_runtime.kernels.block_sparse import gathered_kernels as kernels

    heads, num_blocks, num_keys = counts.shape
    num_lists, device = heads * num_keys, counts.device
    bases = torch.empty(num_lists, num_blocks, dtype=torch.int32, device=device)
    totals, stops = torch.empty(2, num_lists, dtype=torch.int32, device=device)
    tile_lists, tile_starts = torch.empty(2, num_tiles, dtype=torch.int32, device=device)
    kernels.count_lists[(num_lists,)](
        counts, bases, totals, num_blocks, num_keys, *counts.stride(), BLOCK=_step_for(num_blocks), num_warps=4
    )
    kernels.place_lists[(num_lists,)](
        bases,
        totals,
        stops,
        tile_lists,
        tile_starts,
        num_lists,
        num_blocks,
        num_tiles,
        ROWS=rows,
        BLOCK=_step_for(num_blocks),
        LISTS=_step_for(num_lists),
        num_warps=4,
    )
    return GatheredLists(bases, stops, tile_lists, tile_starts)


def _step_for(count: int) -> int:
    return max(16, min(LARGEST_STEP, 1 << (count - 1).bit_length()))
