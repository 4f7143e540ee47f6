"""Row masks: one bit per (query, key block); packing them, counting them, and the lists of blocks they lead to."""

from __future__ import annotations

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.kernels.block_sparse import triton
from diffusion_runtime.kernels.block_sparse.plan import RowCounts

# Bits that are counted in torch at a time.
_CHUNK = 1 << 25

# Key blocks that a program holds in a tile.
MAXIMUM_BLOCKS = 4096


def packed_bits(selected: torch.Tensor) -> torch.Tensor:
    """bool [..., n] as int32 [..., words]: bit b of word w is entry 32 w + b. Bit 31 makes a number negative."""
    count = selected.shape[-1]
    num_words = -(-count // 32)
    padded = torch.nn.functional.pad(selected, (0, 32 * num_words - count))
    bits = 1 << torch.arange(8, device=selected.device)
    octets = (padded.view(*selected.shape[:-1], -1, 8) * bits.to(torch.uint8)).sum(dim=-1, dtype=torch.uint8)
    # Every platform that torch runs on stores the lowest byte first.
    return octets.view(torch.int32)


def unpacked_bits(row_mask: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [..., words] as bool [..., count]: the inverse of packed_bits."""
    bits = torch.arange(32, dtype=torch.int32, device=row_mask.device)
    return ((row_mask[..., None] >> bits) & 1).flatten(-2)[..., :count].bool()


def count_rows(row_mask: torch.Tensor, q: BlockGeometry, num_kv_blocks: int) -> RowCounts:
    """row_mask: int32 [G, S, words] over the positions of q, which all G rows share. Without a synchronisation."""
    if triton.refusal_of_device(row_mask) is None and num_kv_blocks <= MAXIMUM_BLOCKS:
        return count_rows_triton(row_mask, q, num_kv_blocks)
    return count_rows_reference(row_mask, q, num_kv_blocks)


def count_rows_reference(row_mask: torch.Tensor, q: BlockGeometry, num_kv_blocks: int) -> RowCounts:
    """Implement count_rows in torch, as many rows of G at a time as the memory allows."""
    groups, num_rows, _ = row_mask.shape
    of_blocks = torch.empty(groups, q.num_blocks, num_kv_blocks, dtype=torch.int32, device=row_mask.device)
    of_rows = torch.empty(groups, num_rows, dtype=torch.int32, device=row_mask.device)
    ends = q.offsets[0].long()
    step = max(1, _CHUNK // max(1, num_rows * num_kv_blocks))
    for start in range(0, groups, step):
        part = slice(start, start + step)
        bits = unpacked_bits(row_mask[part], num_kv_blocks)
        of_rows[part] = bits.sum(dim=-1, dtype=torch.int32)
        before = torch.nn.functional.pad(bits.cumsum(dim=1, dtype=torch.int32), (0, 0, 1, 0))
        of_blocks[part] = before[:, ends].diff(dim=1)
    return RowCounts(of_blocks, of_rows)


def count_rows_triton(row_mask: torch.Tensor, q: BlockGeometry, num_kv_blocks: int) -> RowCounts:
    """Implement count_rows in Triton."""
    from diffusion_runtime.kernels.block_sparse import gathered_kernels as kernels

    groups, num_rows, words = row_mask.shape
    of_blocks = torch.empty(groups, q.num_blocks, num_kv_blocks, dtype=torch.int32, device=row_mask.device)
    of_rows = torch.empty(groups, num_rows, dtype=torch.int32, device=row_mask.device)
    rows, blocks = tile_of_bits(num_kv_blocks)
    kernels.count_rows[(q.num_blocks, groups)](
        row_mask.contiguous(),
        q.offsets,
        of_blocks,
        of_rows,
        num_rows,
        num_kv_blocks,
        q.num_blocks,
        words,
        ROWS=rows,
        BLOCKS=blocks,
        num_warps=4,
    )
    return RowCounts(of_blocks, of_rows)


def tile_of_bits(num_kv_blocks: int) -> tuple[int, int]:
    """(rows, blocks) of the tiles in which bits are unpacked."""
    blocks = max(32, 1 << (num_kv_blocks - 1).bit_length())
    # 4096 bits take 32 registers of a thread; twice as many spilled on sm_90.
    return max(1, min(32, 4096 // blocks)), blocks


def listed_blocks(of_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv_count, kv_index) of a SparsePlan whose q blocks list what any of their queries sees; index 0 past a count."""
    num_blocks = of_blocks.shape[-1]
    listed = of_blocks > 0
    place = torch.where(listed, listed.cumsum(dim=-1, dtype=torch.int32) - 1, num_blocks).long()
    every = torch.arange(num_blocks, dtype=torch.int32, device=listed.device).expand_as(place)
    # What is not listed goes into one place too many, which is cut off.
    index = torch.zeros(*listed.shape[:-1], num_blocks + 1, dtype=torch.int32, device=listed.device)
    return listed.sum(dim=-1, dtype=torch.int32), index.scatter_(-1, place, every)[..., :num_blocks].contiguous()


def every_block(num_q_blocks: int, num_kv_blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv_count, kv_index) of one selection in which every q block lists every key block, so that row masks decide."""
    listed = torch.arange(num_kv_blocks, dtype=torch.int32, device=device).repeat(1, num_q_blocks, 1)
    return torch.full((1, num_q_blocks), num_kv_blocks, dtype=torch.int32, device=device), listed
