"""Video Sparse Attention: which tiles it keeps, against loops over the definition, and what it computes on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from sparse_oracle import masked_attention, random_qkv
from tables import table

from diffusion_runtime.attention import TokenLayout, attention, plan_attention
from diffusion_runtime.attention.sparse import video_sparse as video_sparse_coarse
from diffusion_runtime.attention.sparse.tiles import tile_geometry
from diffusion_runtime.attention.sparse.video_sparse import num_kept_tiles
from diffusion_runtime.kernels.highest_blocks import highest

VSA = "video_sparse_attn"
RAGGED = TokenLayout((5, 6, 7))
TEXT = TokenLayout((3, 5, 6), num_suffix_tokens=6, valid_lengths=(2, 6))
TEXT_FIRST = TokenLayout((3, 5, 6), num_prefix_tokens=6, valid_lengths=(0, 5))

Tile = tuple[int, int, int]


def tile_of_tokens(grid: Tile, tile: Tile) -> list[int]:
    """The tile of every grid token in raster order, from the definition."""
    counts = [math.ceil(extent / size) for extent, size in zip(grid, tile, strict=True)]
    places = itertools.product(*(range(extent) for extent in grid))
    return [((t // tile[0]) * counts[1] + y // tile[1]) * counts[2] + x // tile[2] for t, y, x in places]


def tile_means(x: torch.Tensor, layout: TokenLayout, tile: Tile = (4, 4, 4)) -> torch.Tensor:
    """float64 [B, heads, tiles, head_dim]."""
    of_token = tile_of_tokens(layout.grid, tile)
    first = layout.num_prefix_tokens
    grid = x[:, first : first + layout.num_grid_tokens].double()
    return torch.stack(
        [grid[:, [s for s, other in enumerate(of_token) if other == n]].mean(dim=1) for n in range(max(of_token) + 1)],
        dim=2,
    )


def coarse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, scale: float, tile: Tile = (4, 4, 4)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [B, H, N, N] and pooled values [B, H, N, head_dim] of the coarse branch, float64."""
    repeats = q.shape[2] // k.shape[2]
    q_means = tile_means(q, layout, tile)
    k_means, v_means = (tile_means(x, layout, tile).repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = scale * q_means @ k_means.transpose(2, 3)
    return scores, scores.softmax(dim=-1) @ v_means


def kept_by_definition(scores: torch.Tensor, sparsity: float) -> list[list[list[list[int]]]]:
    """The kept key tiles, ascending: [sample][head][query tile]."""
    num_tiles = scores.shape[-1]
    count = min(max(math.ceil(round((1 - sparsity) * num_tiles, 6)), 1), num_tiles)
    return [
        [[sorted(sorted(range(num_tiles), key=lambda n: (-row[n], n))[:count]) for row in head] for head in sample]
        for sample in scores.tolist()
    ]


def mask_of(kept: list[list[list[list[int]]]], layout: TokenLayout, tile: Tile = (4, 4, 4)) -> torch.Tensor:
    """bool [B, H, seq, seq], with the text's rules."""
    of_token = tile_of_tokens(layout.grid, tile)
    first, last = layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_grid_tokens
    mask = torch.zeros(len(kept), len(kept[0]), layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for b, sample in enumerate(kept):
        valid = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for start, stop in layout.key_ranges(b):
            valid[start:stop] = True
        for h, rows in enumerate(sample):
            grid = torch.tensor([[other in rows[own] for other in of_token] for own in of_token])
            mask[b, h] = valid[:, None] & valid[None]
            mask[b, h, first:last, first:last] = grid
    return mask


def run(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], layout: TokenLayout, sparsity: float = 0.6, **options: Any
) -> torch.Tensor:
    return attention(*qkv, backend=VSA, options={"sparsity": sparsity, **options}, layout=layout)


# --- which tiles ------------------------------------------------------------------------------------------------------


@table("grid", [(1, 1, 1), (4, 4, 4), (5, 6, 7), (21, 30, 52)])
def test_tiles_hold_every_token_once(grid: Tile) -> None:
    layout = TokenLayout(grid)
    geometry = tile_geometry(layout, (4, 4, 4), "cpu")
    assert int(geometry.sizes.sum()) == layout.num_grid_tokens
    x = torch.arange(layout.num_grid_tokens)
    assert torch.equal(x[geometry.order[0].long()][geometry.positions()[0].long()], x)
    assert geometry.block_of_token()[0].tolist() == tile_of_tokens(grid, (4, 4, 4))


def test_sizes_of_edge_tiles() -> None:
    geometry = tile_geometry(RAGGED, (4, 4, 4), "cpu")
    assert geometry.sizes[0].tolist() == [64, 48, 32, 24, 16, 12, 8, 6]


@table("tile, sparsity", [((4, 4, 4), 0.3), ((4, 4, 4), 0.9), ((4, 4, 8), 0.6), ((4, 8, 8), 0.3), ((4, 8, 8), 1.0)])
def test_selection_equals_the_definition(tile: Tile, sparsity: float) -> None:
    layout = TokenLayout((5, 9, 9), 2, 3)
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2, seed=3)
    plan = plan_attention(q, k, backend=VSA, options={"sparsity": sparsity, "tile_size": tile}, layout=layout)
    scores, _ = coarse(q, k, v, layout, 16**-0.5, tile)
    expected = kept_by_definition(scores, sparsity)
    got = plan.kv_index.view(2, 4, *plan.kv_index.shape[1:])
    assert [[rows.tolist() for rows in sample] for sample in got] == expected
    assert (plan.kv_count == len(expected[0][0][0])).all()
    assert plan.group_of.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(plan.to_dense_mask(), mask_of(expected, layout, tile))


def test_how_many_tiles_are_kept() -> None:
    assert [num_kept_tiles(sparsity, 10) for sparsity in (0.0, 0.05, 0.1, 0.7, 0.8, 0.9, 0.95, 1.0)] == [
        *(10, 10, 9, 3, 2, 1, 1, 1)
    ]
    for num_tiles in (1, 7, 10, 100, 624, 1440):
        for kept in range(1, num_tiles + 1):
            assert num_kept_tiles(1 - kept / num_tiles, num_tiles) == kept


def test_a_negative_scale_reverses_the_choice() -> None:
    q, k, _ = random_qkv(RAGGED)
    keys = torch.zeros_like(k)
    of_token = torch.tensor(tile_of_tokens(RAGGED.grid, (4, 4, 4)))
    keys[..., 0] = of_token[None, :, None].float()
    queries = torch.zeros_like(q)
    queries[..., 0] = 1.0
    kept = [
        plan_attention(queries, keys, backend=VSA, options={"sparsity": 0.75}, layout=RAGGED, scale=scale).kv_index
        for scale in (1.0, -1.0)
    ]
    assert (kept[0] == torch.tensor([6, 7])).all()
    assert (kept[1] == torch.tensor([0, 1])).all()


def test_equal_scores_keep_the_lowest_tiles() -> None:
    q, k, _ = random_qkv(TokenLayout((8, 8, 12)))
    plan = plan_attention(q, torch.ones_like(k), backend=VSA, options={"sparsity": 0.6}, layout=TokenLayout((8, 8, 12)))
    assert (plan.kv_index == torch.arange(5)).all()
    scores = torch.tensor([[1.0, 3, 2, 3, 2, 2], [0.0] * 6, [5.0, 4, 3, 2, 1, 0], [2.0, 2, 2, 3, 3, 0]])
    assert highest(scores, 3).tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2], [0, 3, 4]]


def test_scores_that_are_no_numbers_still_give_whole_rows() -> None:
    scores = torch.tensor([[float("nan")] * 5, [1.0, float("nan"), 0.0, float("-inf"), 2.0], [float("-inf")] * 5])
    for count in range(1, 6):
        for row in highest(scores, count).tolist():
            assert len(set(row)) == count
            assert row == sorted(row)
            assert 0 <= row[0] <= row[-1] < 5


def test_less_sparsity_keeps_all_that_more_kept() -> None:
    layout = TokenLayout((8, 9, 10))
    q, k, _ = random_qkv(layout, batch=2)
    masks = [
        plan_attention(q, k, backend=VSA, options={"sparsity": sparsity}, layout=layout).block_mask
        for sparsity in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)
    ]
    assert [int(mask[0, 0].sum()) for mask in masks] == [1, 2, 6, 9, 13, 17]
    for fewer, more in itertools.pairwise(masks):
        assert (more | ~fewer).all()


def test_means_are_over_real_tokens() -> None:
    """A tile of 6 tokens counts like one of 64: with zeros in empty slots it would lose to any other."""
    of_token = torch.tensor(tile_of_tokens(RAGGED.grid, (4, 4, 4)))
    k = torch.zeros(1, 210, 1, 8)
    k[..., 0] = torch.where(of_token == 7, 2.0, 1.9)[None, :, None]
    q = torch.ones(1, 210, 1, 8)
    plan = plan_attention(q, k, backend=VSA, options={"sparsity": 1.0}, layout=RAGGED)
    assert (plan.kv_index == 7).all()


def test_heads_are_done_in_parts_when_there_are_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_qkv(RAGGED, batch=2, num_heads=6, num_kv_heads=3)
    whole = run((q, k, v), RAGGED)
    with_gate = attention(q, k, v, backend=VSA, options={"sparsity": 0.6}, layout=RAGGED, gate=q)
    monkeypatch.setattr(video_sparse_coarse, "_CHUNK", 8 * 8 * 2 * 2)
    assert torch.equal(run((q, k, v), RAGGED), whole)
    again = attention(q, k, v, backend=VSA, options={"sparsity": 0.6}, layout=RAGGED, gate=q)
    torch.testing.assert_close(again, with_gate, atol=1e-6, rtol=1e-6)


# --- what comes out ---------------------------------------------------------------------------------------------------


@table("head_dim", [64, 72, 80, 96, 128, 256])
def test_output_and_log_sum_exp(head_dim: int) -> None:
    q, k, v = random_qkv(RAGGED, num_heads=2, num_kv_heads=1, head_dim=head_dim, seed=1)
    out, lse = attention(q, k, v, backend=VSA, options={"sparsity": 0.6}, layout=RAGGED, return_lse=True)
    scores, _ = coarse(q, k, v, RAGGED, head_dim**-0.5)
    expected, expected_lse = masked_attention(q, k, v, mask_of(kept_by_definition(scores, 0.6), RAGGED))
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=2e-6)


@table("layout", [TEXT, TEXT_FIRST], ids=["text after", "text before"])
def test_text_of_unequal_lengths(layout: TokenLayout) -> None:
    q, k, v = random_qkv(layout, batch=2, num_heads=2, seed=2)
    options = {"sparsity": 0.5}
    out, lse = attention(q, k, v, backend=VSA, options=options, layout=layout, scale=0.4, return_lse=True)
    scores, _ = coarse(q, k, v, layout, 0.4)
    mask = mask_of(kept_by_definition(scores, 0.5), layout)
    expected, expected_lse = masked_attention(q, k, v, mask, scale=0.4)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=2e-6)
    assert not mask[0].any(dim=-1).all()
    for b in range(2):
        padding = ~mask[b, 0].any(dim=0)
        for x in (q, k, v):
            x[b, padding] = float("nan")
    poisoned = attention(q, k, v, backend=VSA, options=options, layout=layout, scale=0.4)
    assert torch.equal(poisoned, out)


def test_values_of_tiles_that_are_not_kept_do_not_count() -> None:
    q, k, v = random_qkv(RAGGED, num_heads=1)
    out = run((q, k, v), RAGGED)
    mask = plan_attention(q, k, backend=VSA, options={"sparsity": 0.6}, layout=RAGGED).to_dense_mask()[0, 0]
    for key in (0, 40, 209):
        poisoned = v.clone()
        poisoned[0, key] = float("nan")
        seen = run((q, k, poisoned), RAGGED)[0, :, 0].isnan().any(dim=-1)
        assert torch.equal(seen, mask[:, key])
        assert torch.equal(run((q, k, poisoned), RAGGED)[0, ~seen], out[0, ~seen])


@table("grid", [(1, 9, 10), (1, 1, 3), (2, 3, 3)])
def test_images_and_grids_smaller_than_a_tile(grid: Tile) -> None:
    layout = TokenLayout(grid)
    q, k, v = random_qkv(layout, batch=2)
    scores, _ = coarse(q, k, v, layout, 0.25)
    expected, _ = masked_attention(q, k, v, mask_of(kept_by_definition(scores, 0.6), layout))
    torch.testing.assert_close(run((q, k, v), layout).double(), expected, atol=2e-6, rtol=2e-6)


def test_a_batch_equals_its_samples_and_heads_do_not_meet() -> None:
    q, k, v = random_qkv(RAGGED, batch=2, num_heads=4)
    whole = run((q, k, v), RAGGED)
    for b in range(2):
        torch.testing.assert_close(run((q[b : b + 1], k[b : b + 1], v[b : b + 1]), RAGGED), whole[b : b + 1])
    part = run((q[:, :, 1:3], k[:, :, 1:3], v[:, :, 1:3]), RAGGED)
    torch.testing.assert_close(part, whole[:, :, 1:3])


def test_grouped_queries_equal_repeated_keys() -> None:
    q, k, v = random_qkv(RAGGED, batch=2, num_heads=6, num_kv_heads=2)
    repeated = (q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2))
    torch.testing.assert_close(run((q, k, v), RAGGED), run(repeated, RAGGED))


def test_a_plan_of_some_heads_is_a_part_of_the_whole_plan() -> None:
    q, k, _ = random_qkv(RAGGED, batch=2, num_heads=4)
    whole = plan_attention(q, k, backend=VSA, options={"sparsity": 0.6}, layout=RAGGED)
    part = plan_attention(q[:, :, 2:], k[:, :, 2:], backend=VSA, options={"sparsity": 0.6}, layout=RAGGED)
    assert torch.equal(part.to_dense_mask(), whole.heads(2, 4).to_dense_mask())


@table("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_choose_in_float32(dtype: torch.dtype) -> None:
    q, k, v = random_qkv(RAGGED, dtype=dtype, seed=5)
    scores, _ = coarse(q, k, v, RAGGED, 0.25)
    expected, _ = masked_attention(q, k, v, mask_of(kept_by_definition(scores, 0.6), RAGGED))
    tolerance = 1e-9 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    out = run((q, k, v), RAGGED)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_equal_calls_give_equal_bits_and_strides_do_not_matter() -> None:
    q, k, v = random_qkv(RAGGED, batch=2)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(run((q, k, v), RAGGED), run((q, k, v), RAGGED))
    torch.testing.assert_close(run((strided[0], strided[1], strided[2]), RAGGED), run((q, k, v), RAGGED))


def test_a_result_lies_between_the_values_it_saw() -> None:
    q, k, v = random_qkv(RAGGED)
    assert torch.allclose(run((q, k, torch.ones_like(v)), RAGGED), torch.ones_like(v), atol=1e-6)
    assert run((q, k, v), RAGGED).abs().max() <= v.abs().max()


def test_plans_of_different_grids_do_not_share_what_is_kept() -> None:
    layouts = [RAGGED, TokenLayout((7, 6, 5)), dataclasses.replace(RAGGED, num_suffix_tokens=2), RAGGED]
    for layout in layouts:
        q, k, v = random_qkv(layout, seed=7)
        scores, _ = coarse(q, k, v, layout, 0.25)
        expected, _ = masked_attention(q, k, v, mask_of(kept_by_definition(scores, 0.6), layout))
        torch.testing.assert_close(run((q, k, v), layout).double(), expected, atol=2e-6, rtol=2e-6)


def test_a_plan_is_made_without_reading_the_device() -> None:
    """Tensors without numbers, at the size of Wan at 480p: whatever would wait for the device fails on them."""
    layout = TokenLayout((21, 30, 52), 3, valid_lengths=(1, 2))
    q = torch.empty(2, layout.num_tokens, 4, 16, device="meta")
    plan = plan_attention(q, q[:, :, :2], backend=VSA, options={"sparsity": 0.9}, layout=layout)
    assert plan.kv_index.shape == (8, 624, 63)
    geometry = tile_geometry(layout, (4, 4, 4), "meta")
    means = video_sparse_coarse.tile_means(q, q, q, geometry)
    pooled = video_sparse_coarse.attend_tiles(means, scale=1.0, num_kept=None).pooled
    assert pooled is not None
    assert pooled.shape == (2, 4, 624, 16)
