"""Gathered attention for plans with row masks: the queries that see a key block are gathered, and attend to it alone.

With one list of key blocks per 128 queries, what any of them sees is computed for all: at 32,760 tokens, where a query
of V-MoBA sees 0.15 of the keys, blocks of 128 list 0.59 to 0.90 of them. Here every tile of queries sees its key block
whole, so the work is what the queries see. A query's results, one per block, are merged by their log-sum-exp, as in
Dao et al., arXiv:2307.08691, section 3.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.kernels.block_packing import Averaged, pack_tokens, row_width
from diffusion_runtime.kernels.block_sparse import triton
from diffusion_runtime.kernels.block_sparse.gathered_lists import gathered_lists
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.pooled_tail import BlockMeans, TailRows, means_of, tail_rows
from diffusion_runtime.kernels.block_sparse.row_masks import MAXIMUM_BLOCKS, count_rows, tile_of_bits
from diffusion_runtime.kernels.block_sparse.triton import TileShape

# Bytes of the results that wait to be merged. Twelve heads of Wan at 480p with 20 blocks per query take 2 GB in all.
BUDGET = 1 << 30


def refusal(q: torch.Tensor, plan: SparsePlan) -> str | None:
    """Return why this plan cannot be computed here on tensors like q, or None."""
    reason = refusal_of_blocks(q, plan.q, plan.kv, plan.num_grid_tokens)
    if reason is None and (plan.row_mask is None or plan.max_blocks_per_query is None):
        reason = "needs row masks and the number of blocks that a query sees at most"
    return reason


def refusal_of_blocks(q: torch.Tensor, q_blocks: BlockGeometry, kv_blocks: BlockGeometry, num_grid: int) -> str | None:
    """Return why no plan of these blocks can be computed here on tensors like q, or None if any with row masks can."""
    reason = triton.refusal_of_size(q, q_blocks.num_tokens)
    if reason is not None:
        return reason
    if q_blocks.num_tokens > num_grid:
        return "supports no text beside the grid"
    if q_blocks.num_groups > 1 or kv_blocks.num_groups > 1:
        return "needs blocks that all heads share"
    if kv_blocks.num_blocks > MAXIMUM_BLOCKS:
        return f"takes up to {MAXIMUM_BLOCKS} key blocks, not {kv_blocks.num_blocks}"
    return None


def block_sparse_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    packed: PackedTokens | None = None,
    means: BlockMeans | None = None,
    shape: TileShape | None = None,
    budget: int = BUDGET,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; packed, means: as in
    block_sparse_triton.

    Returns out like q and lse [B, H, seq], natural log, float32. budget: bytes of results that wait to be merged; what
    needs more is computed in units, which is as exact.
    """
    prepared = prepare(q, k, v, plan, scale=scale, packed=packed, means=means, shape=shape, budget=budget)
    for unit in prepared.units:
        _run(unit)
        # Or its memory would live until the next unit has allocated its own.
        del unit
    return prepared.out, prepared.lse


def _run(unit: PreparedUnit) -> None:
    for step in unit.steps.values():
        step()


class Unit(NamedTuple):
    """Heads (batch * heads together) and query blocks that are computed together, from first to stop - 1."""

    first_head: int
    stop_head: int
    first_block: int
    stop_block: int


@dataclass(frozen=True)
class PreparedUnit:
    """steps: the parts of a unit, to be called in order: `list`, `attend`, with a pooled tail `tail`, `merge`. Each may
    be called again."""

    unit: Unit
    steps: dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Prepared:
    """Packed inputs, and the units over them."""

    out: torch.Tensor
    lse: torch.Tensor
    units: Iterator[PreparedUnit]


def units_of(plan: SparsePlan, row_bytes: int, budget: int) -> list[Unit]:
    """Whole heads where several fit the budget, else runs of query blocks; at least one block."""
    assert plan.max_blocks_per_query is not None, "refusal asks for it"
    heads, blocks = plan.batch * plan.num_heads, plan.q.num_blocks
    num_rows = max(1, budget // (_entries_per_query(plan) * row_bytes))
    if num_rows >= plan.num_grid_tokens:
        step = num_rows // plan.num_grid_tokens
        return [Unit(head, min(head + step, heads), 0, blocks) for head in range(0, heads, step)]
    step = max(1, num_rows // plan.q.max_block_size)
    return [
        Unit(head, head + 1, block, min(block + step, blocks))
        for head in range(heads)
        for block in range(0, blocks, step)
    ]


def _entries_per_query(plan: SparsePlan) -> int:
    """Return how many results a query has at most: one per block that it sees, and that of a pooled tail."""
    assert plan.max_blocks_per_query is not None, "refusal asks for it"
    return plan.max_blocks_per_query + int(plan.pooled_tail)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    packed: PackedTokens | None = None,
    means: BlockMeans | None = None,
    shape: TileShape | None = None,
    budget: int = BUDGET,
) -> Prepared:
    """Everything that comes before the units; arguments as in block_sparse_gathered."""
    assert plan.row_mask is not None, "refusal asks for it"
    shape = triton.tile_shape(q, plan) if shape is None else shape
    if packed is None:
        averaged: Averaged = "kv" if plan.pooled_tail and means is None else "none"
        packed = pack_tokens(q, k, v, plan.q, plan.kv, num_grid_tokens=plan.num_grid_tokens, averaged=averaged)
    q_packed = packed.q
    if scale <= 0:
        # The running maximum is taken before the scale is applied, so the scale must keep the order.
        q_packed, scale = (-q_packed, -scale) if scale < 0 else (torch.zeros_like(q_packed), 1.0)
    row_mask = plan.row_mask.flatten(0, 1).contiguous()
    counts = plan.row_counts or count_rows(row_mask, plan.q, plan.kv.num_blocks)
    of_rows = counts.of_rows.flatten() + int(plan.pooled_tail)
    num_entries = of_rows.cumsum(0, dtype=torch.int64)
    call = _Call(
        plan=plan,
        shape=shape,
        scale=scale * math.log2(math.e),
        exact=q.dtype == torch.float32,
        head_dim=q.shape[3],
        q=q_packed,
        packed=packed,
        row_mask=row_mask,
        of_blocks=counts.of_blocks,
        of_rows=counts.of_rows,
        row_starts=num_entries - of_rows,
        tail=tail_rows(k, v, plan.kv, means or means_of(packed)) if plan.pooled_tail else None,
        out=q.new_empty(q.shape),
        lse=torch.empty(plan.batch, plan.num_heads, plan.num_tokens, dtype=torch.float32, device=q.device),
    )
    units = units_of(plan, row_width(q.shape[3]) * q.element_size(), budget)
    # One unit after the other, so that all of them reuse the memory of one.
    return Prepared(call.out, call.lse, (call.prepared(unit) for unit in units))


@dataclass(frozen=True)
class _Call:
    plan: SparsePlan
    shape: TileShape
    scale: float
    exact: bool
    head_dim: int
    q: torch.Tensor
    packed: PackedTokens
    row_mask: torch.Tensor
    of_blocks: torch.Tensor
    of_rows: torch.Tensor
    row_starts: torch.Tensor
    tail: TailRows | None
    out: torch.Tensor
    lse: torch.Tensor

    def prepared(self, unit: Unit) -> PreparedUnit:
        """Prepare the steps of a unit. Long, because launches name all of the kernels' arguments."""
        from diffusion_runtime.kernels.block_sparse import gathered_kernels as kernels

        plan, shape, device = self.plan, self.shape, self.q.device
        assert plan.max_blocks_per_query is not None, "refusal asks for it"
        num_heads, num_q_blocks = unit.stop_head - unit.first_head, unit.stop_block - unit.first_block
        num_rows = min(plan.num_grid_tokens, num_q_blocks * plan.q.max_block_size)
        capacity = num_heads * num_rows * _entries_per_query(plan)
        num_lists = num_heads * plan.kv.num_blocks
        width = row_width(self.head_dim)
        # Entries lie list by list, and in a list query block by query block.
        counts = self.of_blocks[unit.first_head : unit.stop_head, unit.first_block : unit.stop_block]
        num_tiles = capacity // shape.rows + num_lists
        lists = gathered_lists(counts, shape.rows, num_tiles)
        entry_rows = torch.empty(capacity, dtype=torch.int32, device=device)
        entry_slots = torch.empty_like(entry_rows)
        partial = torch.empty(capacity, width, dtype=self.q.dtype, device=device)
        partial_lse = torch.empty(capacity, dtype=torch.float32, device=device)
        rows_of_bits, blocks_of_bits = tile_of_bits(plan.kv.num_blocks)

        def list_queries() -> None:
            kernels.list_queries[(num_q_blocks, num_heads)](
                self.row_mask,
                plan.q.offsets,
                self.row_starts,
                lists.bases,
                entry_rows,
                entry_slots,
                unit.first_head,
                unit.first_block,
                num_q_blocks,
                plan.num_grid_tokens,
                plan.kv.num_blocks,
                self.row_mask.shape[2],
                ROWS=rows_of_bits,
                BLOCKS=blocks_of_bits,
                num_warps=4,
            )

        def attend() -> None:
            kernels.attend_lists[(num_tiles,)](
                self.q,
                triton.rows_of(self.packed.k, shape.piece, shape),
                triton.rows_of(self.packed.v, shape.piece, shape),
                self.packed.k,
                self.packed.v,
                plan.kv.offsets,
                lists.tile_lists,
                lists.tile_starts,
                lists.stops,
                entry_rows,
                entry_slots,
                partial,
                partial_lse,
                self.scale,
                unit.first_head,
                plan.num_tokens,
                plan.num_heads,
                plan.num_heads // plan.num_kv_heads,
                plan.kv.num_blocks,
                W=width,
                ROWS=shape.rows,
                PIECE=shape.piece,
                BULK=shape.bulk,
                EXACT=self.exact,
                STAGES=shape.num_stages,
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
            )

        def attend_tail(tail: TailRows) -> None:
            kernels.attend_tail[(-(-num_rows // shape.rows), num_heads)](
                self.q,
                *tail,
                self.row_mask,
                self.row_starts,
                self.of_rows,
                plan.q.offsets,
                partial,
                partial_lse,
                self.scale,
                unit.first_head,
                unit.first_block,
                unit.stop_block,
                plan.num_grid_tokens,
                plan.num_tokens,
                plan.num_heads,
                plan.num_heads // plan.num_kv_heads,
                plan.kv.num_blocks,
                self.row_mask.shape[2],
                W=width,
                ROWS=shape.rows,
                PIECE=shape.piece,
                EXACT=self.exact,
                STAGES=shape.num_stages,
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
            )

        def merge() -> None:
            rows = max(1, 2048 // width)
            kernels.merge_entries[(-(-num_rows // rows), num_heads)](
                partial,
                partial_lse,
                self.row_starts,
                self.of_rows,
                plan.q.order,
                plan.q.offsets,
                self.out,
                self.lse,
                unit.first_head,
                unit.first_block,
                unit.stop_block,
                plan.num_grid_tokens,
                plan.num_heads,
                self.out.stride(0),
                self.out.stride(1),
                self.out.stride(2),
                D=self.head_dim,
                W=width,
                ROWS=rows,
                MORE=int(plan.pooled_tail),
                num_warps=4,
            )

        steps: dict[str, Callable[[], object]] = {"list": list_queries, "attend": attend}
        if self.tail is not None:
            steps["tail"] = functools.partial(attend_tail, self.tail)
        return PreparedUnit(unit, {**steps, "merge": merge})
