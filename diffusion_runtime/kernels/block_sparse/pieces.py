"""A plan as the Triton kernel reads it: key lists as pieces (runs of keys of one size), and tiles of queries."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan

# Rows of a chunk; the kernels' CHUNK.
_CHUNK = 16


@dataclass(frozen=True)
class Pieces:
    """codes: int32 [rows, q blocks, capacity], see list_short_pieces; blocks: the block of each piece, or codes."""

    codes: torch.Tensor
    blocks: torch.Tensor
    num_full: torch.Tensor
    num_partial: torch.Tensor
    per_head: bool


def list_pieces(kernels: ModuleType, plan: SparsePlan, piece: int) -> Pieces:
    """Return the key blocks that each q block lists, cut into runs of at most `piece` rows."""
    per_head = plan.kv.num_groups > 1
    num_rows = plan.batch * plan.num_heads if per_head else plan.kv_count.shape[0]
    index_capacity = plan.kv_index.shape[2]
    short = plan.kv.max_block_size <= piece and plan.row_mask is None
    per_block = plan.kv.max_block_size // piece
    # A block is whole pieces and a rest: one shorter piece with a row mask, else at most this many chunks.
    rests = 1 if plan.row_mask is not None else min(piece, plan.kv.max_block_size + _CHUNK - 1) // _CHUNK
    if plan.kv.uniform_block_size is not None and plan.kv.uniform_block_size % piece == 0:
        rests = 0
    pieces = min(index_capacity * per_block, plan.num_grid_tokens // piece)
    capacity = max(1, pieces + index_capacity * rests)
    device = plan.device
    codes = torch.empty(num_rows, plan.q.num_blocks, capacity, dtype=torch.int32, device=device)
    blocks = torch.empty_like(codes) if plan.row_mask is not None else codes
    num_full = torch.empty(num_rows, plan.q.num_blocks, dtype=torch.int32, device=device)
    num_partial = torch.empty_like(num_full)
    grid = (plan.q.num_blocks, num_rows)
    sizes = (
        plan.q.num_blocks,
        plan.kv.num_blocks,
        index_capacity,
        capacity,
        plan.num_heads,
        plan.num_heads // plan.num_kv_heads,
    )
    listed = (plan.kv_count, plan.kv_index, plan.kv.offsets, plan.group_of)
    if short:
        block = min(1024, max(32, 1 << (index_capacity - 1).bit_length()))
        kernels.list_short_pieces[grid](
            *listed, codes, num_full, num_partial, *sizes, PIECE=piece, BLOCK=block, PER_HEAD=per_head, num_warps=1
        )
    else:
        kernels.list_merged_pieces[grid](
            *listed,
            codes,
            blocks,
            num_full,
            num_partial,
            *sizes,
            PIECE=piece,
            PER_HEAD=per_head,
            MERGE=plan.row_mask is None,
            num_warps=1,
        )
    return Pieces(codes, blocks, num_full, num_partial, per_head)


@dataclass(frozen=True)
class Tiles:
    """Tiles of queries that do not cross blocks. Some may be empty, because the sizes are known on the device alone.

    count: tiles per head; per_block: how many each block has, or 0 when the tables hold the block of each tile.
    rest_rows: a rest of a block with at most this many queries is a shorter tile of its own, one per block, and not
    among these; 0 when there are none.
    """

    count: int
    per_block: int
    blocks: torch.Tensor
    starts: torch.Tensor
    rest_rows: int


def list_tiles(geometry: BlockGeometry, rows: int, rest_rows: int = 0) -> Tiles:
    """Tiles of at most `rows` queries; the rest of a block becomes one of `rest_rows` where that is enough."""
    rest_rows = rest_rows if _has_rests(geometry, rows, rest_rows) else 0
    before_next = rows - 1 - rest_rows
    per_block = (geometry.max_block_size + before_next) // rows
    grid_tokens = geometry.num_tokens
    if geometry.num_groups == 1 and geometry.num_blocks * per_block <= 2 * (grid_tokens // rows + geometry.num_blocks):
        count = geometry.num_blocks * per_block
        return Tiles(count, per_block, geometry.offsets, geometry.offsets, rest_rows)
    count = (grid_tokens + before_next * geometry.num_blocks) // rows
    ends = ((geometry.sizes + before_next) // rows).cumsum(1).to(torch.int32)
    tiles = torch.arange(count, dtype=torch.int32, device=ends.device).expand(geometry.num_groups, -1).contiguous()
    blocks = torch.searchsorted(ends, tiles, right=True, out_int32=True).clamp_(max=geometry.num_blocks - 1)
    before = torch.nn.functional.pad(ends, (1, 0))[:, :-1].gather(1, blocks.long())
    # Tiles past the last one start where the last block has no whole tile left, so they are empty.
    starts = geometry.offsets.gather(1, blocks.long()) + (tiles - before) * rows
    return Tiles(count, 0, blocks, starts.to(torch.int32), rest_rows)


def _has_rests(geometry: BlockGeometry, rows: int, rest_rows: int) -> bool:
    """Return True if a block may leave 1 to `rest_rows` queries after its whole tiles, as far as the host knows."""
    if geometry.max_block_size <= rest_rows:
        return False
    if geometry.uniform_block_size is not None:
        return 0 < geometry.uniform_block_size % rows <= rest_rows
    return rest_rows > 0
