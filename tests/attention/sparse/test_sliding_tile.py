"""Sliding tile attention against its definition: the mask token by token, the output in float64."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_oracle import masked_attention, random_qkv
from tables import table
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_runtime.attention import LayerInfo, SparsePlan, StepInfo, TokenLayout, attention, plan_attention
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.sparse.sliding_tile_windows import default_candidates

Extent = tuple[int, int, int]
NAME = "sliding_tile_attn"


def sees(num_tiles: int, window: int, query: int, key: int) -> bool:
    """The rule of one axis, as the paper's code says it."""
    half = window // 2
    if 2 * half + 1 >= num_tiles:
        return True
    centre = max(half, min(query, num_tiles - 1 - half))
    return abs(centre - key) <= half


def mask_by_definition(layout: TokenLayout, tile: Extent, windows: list[Extent], batch: int = 1) -> torch.Tensor:
    """bool [batch, heads, N, N], one pair of tokens after the other. windows: one a head."""
    num_tiles = [math.ceil(extent / size) for extent, size in zip(layout.grid, tile, strict=True)]
    grid = [
        tuple(place // size for place, size in zip(token, tile, strict=True))
        for token in itertools.product(*map(range, layout.grid))
    ]
    mask = torch.zeros(batch, len(windows), layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for sample, (head, window) in itertools.product(range(batch), enumerate(windows)):
        num_valid = layout.num_text_tokens if layout.valid_lengths is None else layout.valid_lengths[sample]
        text: list[Any] = [index < num_valid for index in range(layout.num_text_tokens)]
        # A token is the tile it lies in, or whether it is text that counts.
        tokens = text[: layout.num_prefix_tokens] + grid + text[layout.num_prefix_tokens :]
        rows = []
        for query in tokens:
            row = []
            for key in tokens:
                if isinstance(query, bool) or isinstance(key, bool):
                    row.append(query is not False and key is not False)
                else:
                    row.append(all(map(sees, num_tiles, window, query, key)))
            rows.append(row)
        mask[sample, head] = torch.tensor(rows)
    return mask


def plan_of(layout: TokenLayout, *, batch: int = 1, heads: int = 2, kv_heads: int | None = None, **options: Any) -> Any:
    q, k, _ = random_qkv(layout, batch=batch, num_heads=heads, num_kv_heads=kv_heads, head_dim=4)
    return plan_attention(q, k, backend=NAME, options=options, layout=layout)


def strategy_file(path: Path, windows: dict[tuple[int, int, int], Extent]) -> str:
    path.write_text(json.dumps({"_".join(map(str, key)): list(window) for key, window in windows.items()}))
    return str(path)


# --- the pattern ------------------------------------------------------------------------------------------------------

MASKS = [
    ((4, 4, 4), (1, 1, 1), (3, 3, 3)),
    ((4, 4, 4), (2, 2, 2), (1, 1, 1)),
    ((5, 6, 3), (1, 2, 1), (3, 1, 2)),
    ((6, 4, 5), (1, 1, 2), (4, 2, 1)),
    ((1, 7, 6), (6, 2, 1), (3, 3, 3)),
    ((3, 5, 7), (2, 2, 2), (1, 3, 3)),
    ((2, 1, 9), (2, 8, 2), (1, 1, 3)),
    ((1, 1, 1), (6, 8, 8), (3, 3, 3)),
]


@table(("grid", "tile", "window"), MASKS)
def test_the_mask_is_the_definition(grid: Extent, tile: Extent, window: Extent) -> None:
    layout = TokenLayout(grid)
    plan = plan_of(layout, heads=1, tile_size=tile, window=window)
    assert torch.equal(plan.to_dense_mask(), mask_by_definition(layout, tile, [window]))


def test_a_ragged_grid_covers_every_token_once() -> None:
    layout = TokenLayout((7, 9, 11))
    plan = plan_of(layout, heads=1, tile_size=(3, 4, 4), window=(1, 3, 1))
    assert plan.kv.num_blocks == 3 * 3 * 3
    assert int(plan.kv.sizes.sum()) == 7 * 9 * 11
    assert int(plan.kv.sizes[0, -1]) == 1 * 1 * 3
    assert torch.equal(plan.kv.order[0].sort().values, torch.arange(7 * 9 * 11, dtype=torch.int32))
    assert torch.equal(plan.to_dense_mask(), mask_by_definition(layout, (3, 4, 4), [(1, 3, 1)]))


@table("text", ["prefix", "suffix"])
def test_text_sees_and_is_seen_by_all_that_is_valid(text: str) -> None:
    layout = TokenLayout((3, 4, 5), valid_lengths=(1, 4, 0), **{f"num_{text}_tokens": 4})
    plan = plan_of(layout, batch=3, heads=1, tile_size=(1, 2, 2), window=(1, 1, 1))
    assert torch.equal(plan.to_dense_mask(), mask_by_definition(layout, (1, 2, 2), [(1, 1, 1)], batch=3))


def axis_table(num_tiles: int, window: int) -> list[list[int]]:
    """The key tiles of every query tile along one axis, out of a plan."""
    plan = plan_of(TokenLayout((1, 1, num_tiles)), heads=1, tile_size=(1, 1, 1), window=(1, 1, window))
    return [row.nonzero()[:, 0].tolist() for row in plan.block_mask[0]]


def test_borders_shift_the_window() -> None:
    assert axis_table(5, 3) == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4], [2, 3, 4]]
    assert axis_table(4, 1) == [[0], [1], [2], [3]]
    assert axis_table(6, 5) == [[0, 1, 2, 3, 4]] * 3 + [[1, 2, 3, 4, 5]] * 3


def test_an_even_window_is_the_next_odd_one() -> None:
    for num_tiles, window in itertools.product(range(1, 9), (2, 4, 6)):
        assert axis_table(num_tiles, window) == axis_table(num_tiles, window + 1)
    assert {len(row) for row in axis_table(10, 4)} == {5}
    assert {len(row) for row in axis_table(10, 9)} == {9}
    assert {len(row) for row in axis_table(5, 4)} == {5}


@table("num_tiles", range(1, 11))
def test_every_tile_sees_as_many_and_itself(num_tiles: int) -> None:
    for window in range(1, 13):
        table = axis_table(num_tiles, window)
        assert {len(row) for row in table} == {min(2 * (window // 2) + 1, num_tiles)}
        assert all(tile in row for tile, row in enumerate(table))


def test_counts_are_products_and_axes_are_independent() -> None:
    num_tiles, window = (4, 5, 6), (3, 1, 4)
    plan = plan_of(TokenLayout(num_tiles), heads=1, tile_size=(1, 1, 1), window=window)
    assert plan.kv_count.unique().tolist() == [3 * 1 * 5]
    # The rows are ascending, so the kernel reads neighbours one after the other.
    assert bool((plan.kv_index.diff(dim=-1) > 0).all())
    alone = [torch.zeros(n, n, dtype=torch.bool) for n in num_tiles]
    for mask, n, w in zip(alone, num_tiles, window, strict=True):
        for query, row in enumerate(axis_table(n, w)):
            mask[query, row] = True
    product = torch.einsum("ad,be,cf->abcdef", *(mask.int() for mask in alone)).bool()
    assert torch.equal(plan.block_mask[0], product.reshape(120, 120))


def test_a_larger_window_sees_more() -> None:
    layout = TokenLayout((6, 5, 4))
    masks = [plan_of(layout, heads=1, tile_size=(1, 1, 1), window=(w, w, w)).block_mask for w in (1, 3, 5, 7)]
    for small, large in itertools.pairwise(masks):
        assert bool((small <= large).all())
        assert small.sum() < large.sum()


@table("window", [(3, 2, 4), (2, 2, 4), (9, 9, 9)])
def test_a_window_of_the_whole_grid_is_dense(window: Extent) -> None:
    layout = TokenLayout((5, 4, 7), num_suffix_tokens=3)
    full = plan_of(layout, tile_size=(2, 2, 2), window=(3, 2, 4))
    plan = plan_of(layout, tile_size=(2, 2, 2), window=window)
    assert plan.is_dense
    assert bool(plan.to_dense_mask().all())
    assert plan.density == 1
    assert torch.equal(plan.kv_index, full.kv_index)
    q, k, v = random_qkv(layout)
    out = attention(q, k, v, backend=NAME, options={"window": window, "tile_size": (2, 2, 2)}, layout=layout)
    assert torch.equal(out, attention(q, k, v, layout=layout))


def test_one_axis_short_of_the_grid_is_not_dense() -> None:
    assert not plan_of(TokenLayout((5, 4, 8)), tile_size=(2, 2, 2), window=(3, 2, 3)).is_dense


def test_the_tile_of_the_paper_is_the_default() -> None:
    plan = plan_of(TokenLayout((12, 16, 16)), heads=1, window=(1, 1, 1))
    assert plan.kv.uniform_block_size == 6 * 8 * 8
    assert plan.kv_count.tolist() == [[1] * 8]
    assert plan.density == 1 / 8


def test_candidates_by_default_are_the_paper_s_on_its_grid() -> None:
    assert set(default_candidates((5, 6, 10))) == {(5, 3, 3), (3, 3, 5), (1, 6, 10), (5, 6, 1), (5, 1, 10)}
    assert default_candidates((1, 1, 1)) == ()
    assert (2, 2, 2) not in default_candidates((2, 2, 2))
    assert default_candidates((1, 1, 4)) == ((1, 1, 1), (1, 1, 2))


# --- heads ------------------------------------------------------------------------------------------------------------

WINDOWS: list[Extent] = [(1, 3, 1), (3, 3, 3), (1, 3, 1), (1, 1, 5)]


@pytest.fixture
def file_of_heads(tmp_path: Path) -> str:
    """Four heads with WINDOWS, one step and layer."""
    return strategy_file(tmp_path / "heads.json", {(0, 0, head): window for head, window in enumerate(WINDOWS)})


def file_options(path: str) -> dict[str, Any]:
    return {"mask_strategy_file_path": path, "tile_size": (2, 2, 2), "skip_time_steps": 0}


def test_heads_with_equal_windows_share_a_selection(file_of_heads: str) -> None:
    layout = TokenLayout((5, 7, 9), num_prefix_tokens=2)
    plan = plan_of(layout, batch=2, heads=4, **file_options(file_of_heads))
    assert plan.kv_index.shape[0] == 3
    assert plan.group_of.shape == (2, 4)
    assert plan.group_of[0, 0] == plan.group_of[1, 2]
    assert plan.group_of[0].unique().numel() == 3
    mask = mask_by_definition(layout, (2, 2, 2), WINDOWS)
    assert torch.equal(plan.to_dense_mask(), mask.expand(2, -1, -1, -1))


def test_windows_that_are_one_on_this_grid_share_too(tmp_path: Path) -> None:
    path = strategy_file(tmp_path / "s.json", {(0, 0, 0): (1, 2, 9), (0, 0, 1): (1, 3, 5)})
    assert plan_of(TokenLayout((2, 8, 8)), **file_options(path)).kv_index.shape[0] == 1


def test_a_head_without_a_window_is_dense(tmp_path: Path) -> None:
    path = strategy_file(tmp_path / "s.json", {(0, 0, 1): (1, 1, 1)})
    layout = TokenLayout((4, 4, 6))
    plan = plan_of(layout, **file_options(path))
    assert not plan.is_dense
    assert torch.equal(plan.to_dense_mask(), mask_by_definition(layout, (2, 2, 2), [(9, 9, 9), (1, 1, 1)]))


def test_heads_of_a_file_equal_runs_of_their_own(file_of_heads: str) -> None:
    layout = TokenLayout((4, 5, 9), num_suffix_tokens=3, valid_lengths=(2,))
    q, k, v = random_qkv(layout, num_heads=4)
    together = attention(q, k, v, backend=NAME, options=file_options(file_of_heads), layout=layout)
    for head, window in enumerate(WINDOWS):
        own = slice(head, head + 1)
        options = {"window": window, "tile_size": (2, 2, 2)}
        alone = attention(q[:, :, own], k[:, :, own], v[:, :, own], backend=NAME, options=options, layout=layout)
        torch.testing.assert_close(together[:, :, own], alone, rtol=0, atol=1e-6)


@table("kv_heads", [4, 2])
def test_a_plan_of_some_heads_is_a_slice(file_of_heads: str, kv_heads: int) -> None:
    layout = TokenLayout((4, 5, 9), num_suffix_tokens=2)
    plan: SparsePlan = plan_of(layout, batch=2, heads=4, kv_heads=kv_heads, **file_options(file_of_heads))
    for start in (0, 2):
        part = plan.heads(start, start + 2)
        assert torch.equal(part.to_dense_mask(), plan.to_dense_mask()[:, start : start + 2])


# --- output -----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "grid": TokenLayout((4, 6, 7)),
    "prefix": TokenLayout((3, 5, 6), num_prefix_tokens=5, valid_lengths=(2, 5)),
    "suffix": TokenLayout((3, 5, 6), num_suffix_tokens=5, valid_lengths=(0, 3)),
    "both sides": TokenLayout((3, 5, 6), num_prefix_tokens=2, num_suffix_tokens=3),
}


def check_against_float64(
    layout: TokenLayout, head_dim: int, scale: float | None, kv_heads: int, path: str, dtype: torch.dtype
) -> None:
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    mask = mask_by_definition(layout, (2, 2, 2), WINDOWS, batch=2)
    expected, expected_lse = masked_attention(q, k, v, mask, scale)
    out, lse = attention(q, k, v, backend=NAME, options=file_options(path), layout=layout, scale=scale, return_lse=True)
    error = 1e-5 if dtype == torch.float32 else 2e-2
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=error)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@table("name", LAYOUTS)
@table(("kv_heads", "scale"), [(4, None), (2, 0.7), (1, None)])
def test_output_and_lse_are_masked_attention(name: str, kv_heads: int, scale: float | None, file_of_heads: str) -> None:
    check_against_float64(LAYOUTS[name], 16, scale, kv_heads, file_of_heads, torch.float32)


@table("head_dim", [64, 72, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, file_of_heads: str) -> None:
    check_against_float64(LAYOUTS["suffix"], head_dim, None, 2, file_of_heads, torch.float32)


@table("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, file_of_heads: str) -> None:
    check_against_float64(LAYOUTS["prefix"], 64, None, 4, file_of_heads, dtype)


def test_samples_of_a_batch_do_not_mix(file_of_heads: str) -> None:
    layout = LAYOUTS["prefix"]
    q, k, v = random_qkv(layout, batch=2, num_heads=4)
    options = file_options(file_of_heads)
    together = attention(q, k, v, backend=NAME, options=options, layout=layout)
    for sample, length in enumerate(layout.valid_lengths or ()):
        own = slice(sample, sample + 1)
        alone = TokenLayout(layout.grid, layout.num_prefix_tokens, valid_lengths=(length,))
        out = attention(q[own], k[own], v[own], backend=NAME, options=options, layout=alone)
        torch.testing.assert_close(together[own], out, rtol=0, atol=1e-6)


def test_constant_values_come_back() -> None:
    layout = LAYOUTS["suffix"]
    q, k, v = random_qkv(layout, batch=2)
    options = {"window": (1, 1, 3), "tile_size": (2, 2, 2)}
    out = attention(q, k, torch.ones_like(v), backend=NAME, options=options, layout=layout)
    valid = out[:, : layout.num_grid_tokens]
    torch.testing.assert_close(valid, torch.ones_like(valid))


@table("poison", [1e4, float("nan")])
def test_padding_does_not_reach_the_output(poison: float) -> None:
    layout = TokenLayout((3, 5, 6), num_suffix_tokens=5, valid_lengths=(3,))
    q, k, v = random_qkv(layout)
    options = {"window": (1, 1, 3), "tile_size": (2, 2, 2)}
    clean = attention(q, k, v, backend=NAME, options=options, layout=layout)
    for tensor in (q, k, v):
        tensor[:, -2:] = poison
    assert torch.equal(attention(q, k, v, backend=NAME, options=options, layout=layout)[:, :-2], clean[:, :-2])


@table("poison", [1e4, float("nan")])
def test_tiles_outside_the_window_do_not_reach_the_output(poison: float) -> None:
    layout = TokenLayout((2, 2, 12))
    q, k, v = random_qkv(layout)
    options = {"window": (1, 1, 3), "tile_size": (2, 2, 2)}
    clean = attention(q, k, v, backend=NAME, options=options, layout=layout)
    column = torch.arange(layout.num_tokens) % 12
    k[:, column >= 6] = poison
    v[:, column >= 6] = poison
    out = attention(q, k, v, backend=NAME, options=options, layout=layout)
    # Six tiles in a row: the first two see tiles 0 to 2 alone, whose columns end at 5.
    assert torch.equal(out[:, column < 4], clean[:, column < 4])
    assert not torch.equal(out[:, column == 4], clean[:, column == 4])


def test_tensors_may_lie_in_any_order_of_memory(file_of_heads: str) -> None:
    layout = LAYOUTS["grid"]
    q, k, v = random_qkv(layout, num_heads=4)
    expected = attention(q, k, v, backend=NAME, options=file_options(file_of_heads), layout=layout)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    out = attention(*strided, backend=NAME, options=file_options(file_of_heads), layout=layout)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


# --- the cost of planning ---------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """The names of the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_planning_waits_for_nothing_once_it_is_warm(tmp_path: Path) -> None:
    """No operator that reads a device's numbers or copies to it, at steps that were not planned before."""
    path = strategy_file(tmp_path / "s.json", {(s, 0, h): WINDOWS[(s + h) % 4] for s in range(4) for h in range(4)})
    layout = TokenLayout((5, 7, 9), num_suffix_tokens=3, valid_lengths=(1, 2))
    q, k, _ = random_qkv(layout, batch=2, num_heads=4)

    def plan(index: int) -> SparsePlan:
        given: dict[str, Any] = {"options": file_options(path), "step": StepInfo(index, 4), "state": state}
        return plan_attention(q, k, backend=NAME, layout=layout, layer=LayerInfo(), **given)

    state = RequestCache()
    plan(0)
    with Operators() as operators:
        plans = [plan(index) for index in (1, 2, 3)]
    assert len({tuple(plan.group_of[0].tolist()) for plan in plans}) == 3
    assert operators.names <= {"aten.select.int", "aten.expand.default", "aten.clone.default"}
