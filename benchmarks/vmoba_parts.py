"""Where the time of one call of V-MoBA goes, planning and attention apart, and what other ways to the same take.

Used by sparse_backends_gpu.py. Each part is timed alone on the inputs that a call gives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.attention import LayerInfo, SparsePlan, TokenLayout
from diffusion_runtime.attention.sparse.vmoba import VMobaOptions, chunk_kind, chunk_shape, chunks_of
from diffusion_runtime.kernels.block_means import block_means
from diffusion_runtime.kernels.block_packing import PackedTokens, pack_tokens
from diffusion_runtime.kernels.block_sparse import gathered
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention
from diffusion_runtime.kernels.block_sparse.row_masks import count_rows, listed_blocks
from diffusion_runtime.kernels.block_sparse.triton import TileShape, tile_shape
from diffusion_runtime.kernels.chunk_selection import SelectionRule, chunk_row_mask, chunk_row_mask_reference


def parts(
    qkv: list[torch.Tensor],
    plan: SparsePlan,
    options: dict[str, Any],
    layer: LayerInfo,
    layout: TokenLayout,
    milliseconds: Callable[[Callable[[], object]], float],
) -> dict[str, float]:
    """Milliseconds of each part. qkv: [1, tokens, heads, head_dim] each; plan: of the same call."""
    q, k, v = qkv
    chosen = VMobaOptions(**options)
    kind = chunk_kind(chosen, layer)
    chunks = chunks_of(layout, chunk_shape(chosen, layout, kind), q.device)
    top = chosen.top[kind] if chosen.moba_select_mode == "topk" else None
    rule = SelectionRule(chosen.moba_threshold_type, top, chosen.moba_threshold)
    means = block_means(k, chunks.kv)
    select = (q, means, chunks.q.order[0], chunks.chunk_of_row, rule)
    assert plan.row_mask is not None
    row_mask = plan.row_mask.flatten(0, 1)
    counts = count_rows(row_mask, plan.q, plan.kv.num_blocks)
    packed = pack_tokens(q, k, v, plan.q, plan.kv, num_grid_tokens=plan.num_grid_tokens)
    kv_count, kv_index = listed_blocks(counts.of_blocks)
    heads = torch.arange(q.shape[2], dtype=torch.int32, device=q.device)[None]
    by_lists = dataclasses.replace(plan, kv_count=kv_count, kv_index=kv_index, group_of=heads)
    times = {
        "plan: means of keys": milliseconds(lambda: block_means(k, chunks.kv)),
        "plan: gates and selection": milliseconds(lambda: chunk_row_mask(*select)),
        "plan: counts of rows": milliseconds(lambda: count_rows(row_mask, plan.q, plan.kv.num_blocks)),
        "plan: lists of blocks": milliseconds(lambda: listed_blocks(counts.of_blocks)),
        "attend: packing": milliseconds(
            lambda: pack_tokens(q, k, v, plan.q, plan.kv, num_grid_tokens=plan.num_grid_tokens)
        ),
    }
    scale = q.shape[3] ** -0.5
    steps = {"list": 0.0, "attend": 0.0, "merge": 0.0}
    num_units = 0
    for unit in gathered.prepare(q, k, v, plan, scale=scale, packed=packed).units:
        for name, step in unit.steps.items():
            steps[name] += milliseconds(step)
        num_units += 1
        del unit, step
    times |= {
        f"attend: lists of queries, {num_units} units": steps["list"],
        f"attend: kernel, {num_units} units": steps["attend"],
        f"attend: merge, {num_units} units": steps["merge"],
        "attend: all of it after packing": milliseconds(
            lambda: gathered.block_sparse_gathered(q, k, v, plan, scale=scale, packed=packed)
        ),
        **{
            f"instead: kernel in {shape.rows}x{shape.piece}, {shape.num_warps} warps, {shape.num_stages} stages": (
                kernel_alone(qkv, plan, packed, shape, milliseconds)
            )
            # Every unit is timed by itself, so other shapes only where there are few.
            for shape in (other_shapes(tile_shape(q, plan)) if num_units <= 4 else ())
        },
        "instead: by lists of blocks": milliseconds(
            lambda: block_sparse_attention(q, k, v, by_lists, packed=packed, implementation="triton")
        ),
        "instead: selection by sorting": milliseconds(lambda: chunk_row_mask_reference(*select)),
    }
    return times


def other_shapes(shape: TileShape) -> list[TileShape]:
    """Tiles that the kernel might be faster in."""
    if not shape.bulk:
        return [dataclasses.replace(shape, rows=32)]
    tried = ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2))
    return [TileShape(rows, piece, warps, stages, True) for rows, piece, warps, stages in tried]


def kernel_alone(
    qkv: list[torch.Tensor],
    plan: SparsePlan,
    packed: PackedTokens,
    shape: TileShape,
    milliseconds: Callable[[Callable[[], object]], float],
) -> float:
    """Milliseconds of the kernel over all units, without their lists and their merge."""
    q, k, v = qkv
    total = 0.0
    for unit in gathered.prepare(q, k, v, plan, scale=q.shape[3] ** -0.5, packed=packed, shape=shape).units:
        unit.steps["list"]()
        total += milliseconds(unit.steps["attend"])
        del unit
    return total
