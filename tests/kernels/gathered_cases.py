"""Gathered attention against the reference; run under the interpreter as a script, or imported on a GPU.

TRITON_INTERPRET=1 python tests/kernels/gathered_cases.py
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from sparse_oracle import random_qkv  # noqa: E402
from sparse_plans import row_mask_plan  # noqa: E402

from diffusion_runtime.attention import SparsePlan, TokenLayout, attention, plan_attention  # noqa: E402
from diffusion_runtime.kernels.block_sparse import gathered, gathered_lists, pooled_tail, row_masks  # noqa: E402
from diffusion_runtime.kernels.block_sparse.gathered import block_sparse_gathered, units_of  # noqa: E402
from diffusion_runtime.kernels.block_sparse.gathered_lists import (  # noqa: E402
    gathered_lists_reference,
    gathered_lists_triton,
)
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference  # noqa: E402
from diffusion_runtime.kernels.block_sparse.triton import TileShape  # noqa: E402

SMALL = TokenLayout((3, 3, 6))
LARGE = TokenLayout((5, 12, 14))
# Bytes of one row of float32 with 16 columns.
ROW = 64


def gathered_plan(layout: TokenLayout, tile: tuple[int, int, int] = (2, 2, 4), batch: int = 2) -> SparsePlan:
    """A row mask plan whose bits are those of listed blocks alone; the first three queries see nothing."""
    plan = row_mask_plan(layout, tile, batch=batch, heads=2, kv_heads=1)
    seen = torch.stack(
        [torch.stack([plan.row_selection(sample, head) for head in range(2)]) for sample in range(batch)]
    )
    mask = row_masks.packed_bits(seen)
    return dataclasses.replace(plan, row_mask=mask, max_blocks_per_query=int(seen.sum(dim=-1).max()))


def check(
    plan: SparsePlan,
    layout: TokenLayout,
    *,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    shape: TileShape | None = None,
    scale: float = 0.3,
    budget: int = 1 << 30,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors within three times the reference's own from float64; rows that see nothing are 0 and -inf."""
    plan = plan.to(device)
    q, k, v = (
        x.to(device)
        for x in random_qkv(layout, batch=plan.batch, num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    )
    exact, exact_lse = block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=scale)
    rounded, _ = block_sparse_reference(q, k, v, plan, scale=scale)
    out, lse = block_sparse_gathered(q, k, v, plan, scale=scale, shape=shape, budget=budget)
    rounding = torch.finfo(dtype).eps
    own = float((rounded.double() - exact).norm() / exact.norm())
    empty = exact_lse == float("-inf")
    assert empty.any() != plan.pooled_tail, "the plan has rows that see nothing, and with a pooled tail none does"
    assert torch.equal(lse == float("-inf"), empty), "rows that see nothing"
    assert not out.transpose(1, 2)[empty].any(), "rows that see nothing are 0"
    assert float((out.double() - exact).norm() / exact.norm()) <= max(3 * own, 4 * rounding)
    assert float((lse.double() - exact_lse).masked_fill(empty, 0).abs().max()) <= 1e-4 + 8 * rounding
    return out, lse


def check_poisoned_values(plan: SparsePlan, layout: TokenLayout, shape: TileShape | None, device: str) -> None:
    """NaN and inf in values and keys reach the queries that see them, and no bit of any other changes."""
    plan = plan.to(device)
    q, k, v = (x.to(device) for x in random_qkv(layout, batch=plan.batch, num_heads=2, num_kv_heads=1, head_dim=16))
    clean, _ = block_sparse_gathered(q, k, v, plan, scale=0.25, shape=shape)
    mask = plan.to_dense_mask().transpose(1, 2)
    for x, poison in ((v, {0: float("nan"), 29: float("inf")}), (k, {40: float("nan")})):
        poisoned = x.clone()
        for key, value in poison.items():
            poisoned[:, key] = value
        out, _ = block_sparse_gathered(q, *((k, poisoned) if x is v else (poisoned, v)), plan, scale=0.25, shape=shape)
        sees = mask[..., list(poison)].any(dim=-1)
        assert sees.any()
        assert not sees.all()
        assert torch.equal(~out.isfinite().all(dim=-1), sees)
        assert torch.equal(out[~sees], clean[~sees])


def main() -> None:
    """Tiles of more and of fewer rows than a list, bulk copies and pointers; units of heads and of query blocks."""
    plan = gathered_plan(SMALL)
    rows = TileShape(16, 16, 4, 2, False), TileShape(8, 32, 4, 2, True)
    whole = check(plan, SMALL, shape=rows[0])
    row = ROW * (plan.max_blocks_per_query or 0)
    for budget, expected in ((3 * 54 * row, 2), (40 * row, 4 * 4), (1, 4 * plan.q.num_blocks)):
        units = units_of(plan, ROW, budget)
        assert len(units) == expected, (units, plan.q.num_blocks, plan.q.max_block_size)
    # Units of a head's query blocks; units of whole heads are those of the plan below, of one sample.
    again = check(plan, SMALL, shape=rows[0], budget=40 * row)
    # Queries lie elsewhere in a tile then, and numpy's products, which the interpreter takes, round by place.
    torch.testing.assert_close(again, whole, rtol=2e-6, atol=2e-6)
    pooled = dataclasses.replace(plan, pooled_tail=True)
    whole = check(pooled, SMALL, shape=rows[1])
    again = check(pooled, SMALL, shape=rows[0], budget=40 * row)
    torch.testing.assert_close(again, whole, rtol=5e-6, atol=5e-6)
    # Blocks of more queries than a tile of bits.
    one = gathered_plan(SMALL, (3, 3, 4), batch=1)
    assert one.q.max_block_size > row_masks.tile_of_bits(one.kv.num_blocks)[0]
    check(one, SMALL, shape=rows[1], scale=-0.3, head_dim=24)
    check(one, SMALL, shape=rows[0], scale=0.0, dtype=torch.float16)
    check(dataclasses.replace(one, pooled_tail=True), SMALL, shape=rows[0], scale=-0.3, head_dim=24)
    check_poisoned_values(one, SMALL, rows[0], "cpu")
    counts = row_masks.count_rows_triton(plan.row_mask.flatten(0, 1), plan.q, plan.kv.num_blocks)  # type: ignore[union-attr]
    expected_counts = row_masks.count_rows_reference(plan.row_mask.flatten(0, 1), plan.q, plan.kv.num_blocks)  # type: ignore[union-attr]
    assert torch.equal(counts.of_blocks, expected_counts.of_blocks)
    assert torch.equal(counts.of_rows, expected_counts.of_rows)
    check_lists("cpu")
    check_whole_call()
    print("ok")


def check_lists(device: str) -> None:
    """Two launches give what single operations give; many lists and blocks, empty ones, and no query at all."""
    generator = torch.Generator().manual_seed(3)
    # Long lists, more blocks than a program reads at a time, more lists of several heads, and no query at all.
    cases = (((2, 5, 7, 40), (16,)), ((1, 33, 3, 2), (1,)), ((3, 2, 9, 9), (16, 1)), ((2, 3, 4, 1), (1,)))
    for (heads, blocks, keys, most), tiles in cases:
        counts = torch.randint(0, most, (heads + 1, blocks, keys), generator=generator, dtype=torch.int32)
        counts[:, :, keys // 2] = 0
        # Some heads of more, as a unit takes them.
        part = counts.to(device)[1:]
        # More blocks, lists and tiles than a program reads at a time.
        for rows in tiles:
            num_tiles = int(part.sum()) // rows + heads * keys
            with mock.patch.object(gathered_lists, "LARGEST_STEP", 16):
                found = gathered_lists_triton(part, rows, num_tiles)
            expected = gathered_lists_reference(part, rows, num_tiles)
            for name, ours, theirs in zip(found._fields, found, expected, strict=True):
                assert torch.equal(ours, theirs), (heads, blocks, keys, rows, name)


def check_whole_call() -> None:
    """A call of V-MoBA packs its tokens once, and the keys' means come from that pass."""
    q, k, v = random_qkv(SMALL, num_heads=2, num_kv_heads=1, head_dim=16)
    options = {"temporal_chunk_size": 1, "moba_select_mode": "topk", "temporal_topk": 2, "first_full_step": 0}
    for tail in ("none", "pooled"):
        check_packed_once(q, k, v, {"backend": "vmoba", "options": {**options, "tail": tail}, "layout": SMALL})


def check_packed_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Means of values are those of the same pass too."""
    from diffusion_runtime.attention.sparse import vmoba

    with (
        mock.patch.object(vmoba, "pack_tokens", side_effect=vmoba.pack_tokens) as packed,
        mock.patch.object(gathered, "pack_tokens", side_effect=gathered.pack_tokens) as again,
        mock.patch.object(vmoba, "block_means", side_effect=vmoba.block_means) as averaged,
        mock.patch.object(pooled_tail, "block_means", side_effect=AssertionError("averaged again")),
    ):
        out = attention(q, k, v, **arguments)
    assert (packed.call_count, again.call_count, averaged.call_count) == (1, 0, 0)
    plan = plan_attention(q, k, **arguments)
    expected, _ = block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=16**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    main()
