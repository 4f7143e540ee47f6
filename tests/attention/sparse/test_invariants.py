"""What every sparse method must keep, against float64 masked attention of its own plan.

Where each of the twenty invariants is tested. Names without a file are here, for all methods; ../ is tests/attention.

 1 a full plan is dense        test_a_full_plan_is_the_dense_backend_to_the_bit,
                               test_video_sparse_gate.py::test_dense_is_a_sparsity_of_0
 2 orders and their inverses   test_orders_hold_every_token_once_and_sizes_add_up
 3 sizes of blocks             test_orders_hold_every_token_once_and_sizes_add_up,
                               test_sparse_video_gen_2.py::test_empty_clusters_do_no_harm,
                               ../../kernels/test_block_sparse.py::test_reference_is_masked_attention (blocks of 0)
 4 every query sees something  test_every_valid_query_sees_something
 5 exact counts                test_sliding_tile.py::test_counts_are_products_and_axes_are_independent,
                               test_video_sparse.py::test_how_many_tiles_are_kept,
                               test_video_sparse.py::test_selection_equals_the_definition,
                               test_vmoba_selection.py::test_topk_equals_the_definition,
                               test_vmoba_selection.py::test_threshold_equals_the_definition,
                               test_sparse_video_gen_2_selection.py::test_the_kept_mass_passes_top_p_and_is_minimal,
                               test_sparse_video_gen_2.py::test_the_smallest_share_of_clusters_is_kept
 6 means of what is seen       test_a_result_lies_between_the_values_it_saw
 7 monotone                    test_wider_options_see_all_that_narrower_ones_saw
 8 poison                      test_padding_changes_nothing, test_a_value_reaches_those_who_see_it_and_nobody_else,
                               test_keys_that_a_block_does_not_see_change_none_of_its_bits
 9 independence                test_samples_of_a_batch_do_not_meet, test_grouped_queries_equal_repeated_keys,
                               test_heads_do_not_meet
10 text                        test_text_sees_and_is_seen_by_all_that_is_valid
11 log-sum-exp                 test_output_and_log_sum_exp_are_masked_attention, test_halves_merge_to_the_whole
12 scale                       test_the_scale_is_honoured,
                               test_video_sparse.py::test_a_negative_scale_reverses_the_choice,
                               test_vmoba.py::test_the_scale_changes_weights_and_not_the_choice,
                               test_sparse_video_gen_2.py::test_the_scale_decides_the_selection_and_the_softmax
13 heads in parts              test_heads_do_not_meet, test_sliding_tile.py::test_a_plan_of_some_heads_is_a_slice
14 shapes and dtypes           test_head_sizes, test_dtypes, test_any_number_of_tokens, test_strides_do_not_matter
15 schedules                   test_dense_by_schedule, test_sliding_tile.py::test_a_head_without_a_window_is_dense,
                               test_sliding_tile_strategy.py::test_a_file_keeps_fifteen_steps_full_and_a_window_none,
                               test_video_sparse_gate.py::test_everywhere_else_it_is_sparse,
                               test_vmoba_selection.py::test_where_it_is_dense,
                               test_sparse_video_gen_2_state.py::test_first_layers_and_first_steps_are_dense
16 CPU and GPU plan alike      test_invariants_gpu.py::test_static_plans_are_those_of_the_cpu
17 no waiting                  test_invariants_gpu.py::test_a_warm_step_waits_for_nothing_and_repeats_to_the_bit,
                               test_sliding_tile.py::test_planning_waits_for_nothing_once_it_is_warm,
                               test_video_sparse.py::test_a_plan_is_made_without_reading_the_device,
                               test_vmoba_selection.py::test_a_plan_is_made_without_reading_the_device
18 determinism                 test_two_runs_are_equal_and_draw_nothing,
                               test_sparse_video_gen_2_state.py::test_the_same_seed_gives_the_same_plan_and_another_does_not
19 nothing is shared           test_requests_branches_and_grids_share_nothing,
                               test_video_sparse.py::test_plans_of_different_grids_do_not_share_what_is_kept,
                               test_sparse_video_gen_2_state.py::test_branches_experts_and_layers_start_on_their_own
20 rotary, then the order      test_positions_belong_to_tokens, test_the_order_inside_a_block_is_storage_alone,
                               test_tokens_may_stand_in_tiles
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import torch
from sparse_oracle import (
    CASES,
    Case,
    Options,
    in_order,
    masked_attention,
    random_qkv,
    shuffled,
    valid_tokens,
)
from tables import table

from diffusion_runtime.attention import (
    LayerInfo,
    RequestCache,
    SparsePlan,
    StepInfo,
    TokenLayout,
    attention,
    plan_attention,
)
from diffusion_runtime.attention.sparse.tiles import tile_order
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention
from diffusion_runtime.kernels.qk_norm_rope.reference import rotate
from diffusion_runtime.layers.rope import grid_rotations

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

GRID = TokenLayout((5, 6, 7))
AFTER = TokenLayout((3, 5, 6), num_suffix_tokens=6, valid_lengths=(2, 6))
BEFORE = TokenLayout((3, 5, 6), num_prefix_tokens=6, valid_lengths=(0, 5))
every_case = table("case", CASES.values(), ids=CASES)
every_layout = table("layout", [GRID, AFTER, BEFORE], ids=["grid", "text after", "text before"])

with_text = table("layout", [AFTER, BEFORE], ids=["text after", "text before"])


def tokens(layout: TokenLayout = GRID, *, kv_heads: int = 2, head_dim: int = 16, **rest: Any) -> Tensors:
    return random_qkv(layout, batch=2, num_heads=4, num_kv_heads=kv_heads, head_dim=head_dim, **rest)


def check(case: Case, qkv: Tensors, layout: TokenLayout = GRID, tolerance: float = 5e-6, **changes: Any) -> SparsePlan:
    """Output and log-sum-exp of valid queries are those of the plan's mask; returns the plan."""
    arguments = case.arguments(layout, **changes)
    plan = plan_attention(*qkv[:2], **arguments)
    out, lse = attention(*qkv, return_lse=True, **arguments)
    expected, expected_lse = masked_attention(*qkv, plan.to_dense_mask(), changes.get("scale"))
    assert out.dtype == qkv[0].dtype
    valid = valid_rows(layout)
    torch.testing.assert_close(out[valid].double(), expected[valid], atol=tolerance, rtol=tolerance)
    lse, expected_lse = lse.transpose(1, 2)[valid], expected_lse.transpose(1, 2)[valid]
    torch.testing.assert_close(lse.double(), expected_lse, atol=5e-6, rtol=5e-6)
    return plan


def valid_rows(layout: TokenLayout) -> torch.Tensor:
    """bool [2, seq]."""
    return torch.stack([valid_tokens(layout, sample) for sample in range(2)])


def dense(qkv: Tensors, layout: TokenLayout = GRID) -> torch.Tensor:
    return attention(*qkv, backend="torch_sdpa", layout=layout)


def test_the_list_above_names_tests_that_exist() -> None:
    here = Path(__file__)
    assert [int(number) for number in re.findall(r"^ ?(\d+) ", __doc__, re.MULTILINE)] == list(range(1, 21))
    for file, name in re.findall(r"(?:(\S+\.py)::)?(test_\w+)\b(?!\.py)", __doc__):
        assert f"def {name}(" in (here.parent / (file or here.name)).read_text(encoding="utf-8"), (file, name)


# --- what a plan keeps ------------------------------------------------------------------------------------------------


@every_case
@every_layout
def test_output_and_log_sum_exp_are_masked_attention(case: Case, layout: TokenLayout) -> None:
    plan = check(case, tokens(layout), layout)
    assert not plan.is_dense
    assert 0.02 < plan.density < 0.9


@every_case
@every_layout
def test_a_full_plan_is_the_dense_backend_to_the_bit(case: Case, layout: TokenLayout) -> None:
    qkv, valid = tokens(layout), valid_rows(layout)
    for change in case.full:
        plan = check(case, qkv, layout, options={**case.options, **change})
        assert plan.is_dense, "make a plan that lists every block with is_dense=True: a dense backend computes it"
        assert torch.equal(plan.to_dense_mask(), (valid[:, None, :, None] & valid[:, None, None]).expand(-1, 4, -1, -1))
        out = attention(*qkv, **case.arguments(layout, options={**case.options, **change}))
        # Queries of padding say nothing: a dense backend computes them, the block-sparse kernel leaves them 0.
        assert torch.equal(out[valid], dense(qkv, layout)[valid])


@every_case
@every_layout
def test_orders_hold_every_token_once_and_sizes_add_up(case: Case, layout: TokenLayout) -> None:
    plan = plan_attention(*tokens(layout)[:2], **case.arguments(layout))
    every = torch.arange(layout.num_tokens, dtype=torch.int32)
    for geometry in (plan.q, plan.kv):
        assert (geometry.order.sort(dim=1).values == every).all()
        assert (geometry.order.gather(1, geometry.positions().long()) == every).all()
        assert (geometry.sizes >= 0).all()
        assert (geometry.sizes.sum(dim=1) == layout.num_grid_tokens).all()
        assert geometry.sizes.max() <= geometry.max_block_size
        assert geometry.uniform_block_size is None or (geometry.sizes == geometry.uniform_block_size).all()


@every_case
@every_layout
def test_every_valid_query_sees_something(case: Case, layout: TokenLayout) -> None:
    mask = plan_attention(*tokens(layout)[:2], **case.arguments(layout)).to_dense_mask()
    valid = valid_rows(layout)[:, None].expand(-1, 4, -1)
    assert torch.equal(mask.any(dim=3), valid)
    if case.sees_itself:
        assert torch.equal(mask.diagonal(dim1=2, dim2=3), valid)


@every_case
def test_a_result_lies_between_the_values_it_saw(case: Case) -> None:
    q, k, v = tokens()
    out = attention(q, k, v, **case.arguments(GRID)).transpose(1, 2)
    unseen = ~plan_attention(q, k, **case.arguments(GRID)).to_dense_mask()[..., None]
    values = v.transpose(1, 2).repeat_interleave(2, dim=1)[:, :, None]
    assert (out <= values.masked_fill(unseen, float("-inf")).amax(dim=3) + 1e-5).all()
    assert (out >= values.masked_fill(unseen, float("inf")).amin(dim=3) - 1e-5).all()
    ones = torch.ones_like(v)
    torch.testing.assert_close(attention(q, k, ones, **case.arguments(GRID)), torch.ones_like(q))


@every_case
def test_wider_options_see_all_that_narrower_ones_saw(case: Case) -> None:
    q, k, _ = tokens()
    plans = [plan_attention(q, k, **case.arguments(GRID, options={**case.options, **change})) for change in case.wider]
    for narrow, wide in itertools.pairwise(plans):
        assert (wide.to_dense_mask() | ~narrow.to_dense_mask()).all()
        assert narrow.density < wide.density < 1


@every_case
@with_text
def test_text_sees_and_is_seen_by_all_that_is_valid(case: Case, layout: TokenLayout) -> None:
    mask = plan_attention(*tokens(layout)[:2], **case.arguments(layout)).to_dense_mask()
    is_text = torch.ones(layout.num_tokens, dtype=torch.bool)
    is_text[layout.num_prefix_tokens :][: layout.num_grid_tokens] = False
    valid = valid_rows(layout)
    expected = (valid[:, None, :, None] & valid[:, None, None]).expand(-1, 4, -1, -1)
    assert torch.equal(mask[:, :, is_text], expected[:, :, is_text])
    assert torch.equal(mask[..., is_text], expected[..., is_text])


# --- what may not change the result -----------------------------------------------------------------------------------


@every_case
@with_text
@table("poison", [1e4, float("nan")])
def test_padding_changes_nothing(case: Case, layout: TokenLayout, poison: float) -> None:
    qkv = tokens(layout)
    clean = attention(*qkv, return_lse=True, **case.arguments(layout))
    padded = ~valid_rows(layout)
    for x in qkv:
        x[padded] = poison
    for now, before in zip(attention(*qkv, return_lse=True, **case.arguments(layout)), clean, strict=True):
        assert torch.equal(now, before)
    assert not clean[0][padded].any()
    assert (clean[1].transpose(1, 2)[padded] == float("-inf")).all()


@every_case
def test_a_value_reaches_those_who_see_it_and_nobody_else(case: Case) -> None:
    q, k, v = tokens()
    mask = plan_attention(q, k, **case.arguments(GRID)).to_dense_mask().transpose(1, 2)
    clean = attention(q, k, v, **case.arguments(GRID))
    for key in (0, 100, 209):
        poisoned = v.clone()
        poisoned[:, key] = float("nan")
        out = attention(q, k, poisoned, **case.arguments(GRID))
        sees = mask[..., key]
        assert torch.equal(out.isnan().any(dim=-1), sees)
        assert torch.equal(out[~sees], clean[~sees])


@every_case
@table("poison", [1e4, float("nan")])
def test_keys_that_a_block_does_not_see_change_none_of_its_bits(case: Case, poison: float) -> None:
    """The plan is given: other keys would be another selection."""
    q, k, v = tokens(AFTER, kv_heads=4)
    plan = plan_attention(q, k, **case.arguments(AFTER, options={**case.options, **case.wider[0]}))
    clean = block_sparse_attention(q, k, v, plan).out.transpose(1, 2)
    blocks = plan.q.block_of_token().expand(8, -1)
    rows = (blocks == blocks[:, 40:41]).view(2, 4, -1)
    unseen = ~(plan.to_dense_mask() & rows[..., None]).any(dim=2)
    assert unseen[..., : AFTER.num_grid_tokens].any(dim=2).all()
    for x in (k, v):
        x.transpose(1, 2)[unseen] = poison
    out = block_sparse_attention(q, k, v, plan).out.transpose(1, 2)
    assert torch.equal(out[rows], clean[rows])
    assert not torch.equal(out, clean), "other blocks see what was poisoned"


@every_case
def test_samples_of_a_batch_do_not_meet(case: Case) -> None:
    q, k, v = tokens(AFTER)
    q[1], k[1] = 20 * q[1], k[1] + 3
    plan = plan_attention(q, k, **case.arguments(AFTER))
    out = attention(q, k, v, **case.arguments(AFTER))
    for sample in range(2):
        own = slice(sample, sample + 1)
        alone = dataclasses.replace(AFTER, valid_lengths=(AFTER.valid_lengths or ())[own])
        expected = plan_attention(q[own], k[own], **case.arguments(alone)).to_dense_mask()
        assert torch.equal(plan.to_dense_mask()[own], expected)
        result = attention(q[own], k[own], v[own], **case.arguments(alone))
        torch.testing.assert_close(out[own], result, atol=1e-6, rtol=1e-6)


@every_case
def test_grouped_queries_equal_repeated_keys(case: Case) -> None:
    q, k, v = tokens(AFTER)
    repeated = (q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2))
    masks = [plan_attention(*qkv[:2], **case.arguments(AFTER)).to_dense_mask() for qkv in ((q, k, v), repeated)]
    assert torch.equal(*masks)
    outs = [attention(*qkv, **case.arguments(AFTER)) for qkv in ((q, k, v), repeated)]
    torch.testing.assert_close(*outs, atol=1e-6, rtol=1e-6)


@every_case
def test_heads_do_not_meet(case: Case) -> None:
    """Half of the heads planned alone are half of the plan, as processes that share a sequence by heads need it.

    V-MoBA's groups `overall` and `block` compare the heads with each other: they cannot be split, and are not equal.
    """
    q, k, v = tokens(AFTER)
    k[:, :, 1] *= 5
    whole, out = plan_attention(q, k, **case.arguments(AFTER)), attention(q, k, v, **case.arguments(AFTER))
    equal = []
    for start, stop in ((0, 2), (2, 4)):
        part = (q[:, :, start:stop], *(x[:, :, start // 2 : stop // 2] for x in (k, v)))
        plan = plan_attention(*part[:2], **case.arguments(AFTER))
        equal.append(torch.equal(plan.to_dense_mask(), whole.heads(start, stop).to_dense_mask()))
        if not case.compares_heads:
            result = attention(*part, **case.arguments(AFTER))
            torch.testing.assert_close(out[:, :, start:stop], result, atol=1e-6, rtol=1e-6)
    assert all(equal) != case.compares_heads


@every_case
def test_halves_merge_to_the_whole(case: Case) -> None:
    """By their log-sum-exp; some rows of a half see nothing, which is 0 and minus infinity."""
    q, k, v = tokens()
    plan = plan_attention(q, k, **case.arguments(GRID))
    first = plan.kv_count // 2
    places = (torch.arange(plan.kv_index.shape[-1]) + first[..., None]).clamp(max=plan.kv_index.shape[-1] - 1)
    rest = dataclasses.replace(plan, kv_count=plan.kv_count - first, kv_index=plan.kv_index.gather(-1, places))
    halves = [
        block_sparse_attention(q, k, v, part, return_lse=True)
        for part in (dataclasses.replace(plan, kv_count=first), rest)
    ]
    lse = torch.stack([half.lse for half in halves if half.lse is not None])
    weights = lse.softmax(dim=0).transpose(2, 3)[..., None]
    out, whole_lse = masked_attention(q, k, v, plan.to_dense_mask())
    merged = weights[0] * halves[0].out + weights[1] * halves[1].out
    torch.testing.assert_close(merged.double(), out, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(lse.logsumexp(dim=0).double(), whole_lse, atol=5e-6, rtol=5e-6)


@every_case
@table("scale", [0.7, -0.2, 0.0])
def test_the_scale_is_honoured(case: Case, scale: float) -> None:
    qkv = tokens(AFTER)
    check(case, qkv, AFTER, scale=scale)
    out, plain = attention(*qkv, **case.arguments(AFTER, scale=scale)), attention(*qkv, **case.arguments(AFTER))
    assert not torch.allclose(out, plain, atol=1e-2)


# --- shapes -----------------------------------------------------------------------------------------------------------


@every_case
@table("head_dim", [64, 72, 80, 96, 128, 256])
def test_head_sizes(case: Case, head_dim: int) -> None:
    assert not check(case, tokens(AFTER, head_dim=head_dim), AFTER).is_dense


@every_case
@table("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(case: Case, dtype: torch.dtype) -> None:
    assert not check(case, tokens(BEFORE, dtype=dtype), BEFORE, max(2 * torch.finfo(dtype).eps, 1e-12)).is_dense


@every_case
@table("grid", [(1, 1, 1), (1, 1, 3), (1, 9, 10), (2, 3, 1), (1, 1, 127), (7, 1, 11), (3, 5, 13)])
def test_any_number_of_tokens(case: Case, grid: tuple[int, int, int]) -> None:
    layout = TokenLayout(grid, num_prefix_tokens=1, num_suffix_tokens=2)
    check(case, tokens(layout), layout)
    check(case, tokens(TokenLayout(grid)), TokenLayout(grid))


@every_case
def test_strides_do_not_matter(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(2, AFTER.num_tokens, (4 + 2 + 2) * 16, generator=generator)
    kept = projection.clone()
    q, k, v = (x.unflatten(2, (-1, 16)) for x in projection.split([64, 32, 32], dim=2))
    assert not q.is_contiguous()
    packed = attention(*(x.contiguous() for x in (q, k, v)), **case.arguments(AFTER))
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    for strided in ((q, k, v), turned):
        torch.testing.assert_close(attention(*strided, **case.arguments(AFTER)), packed, atol=1e-6, rtol=1e-6)
    assert torch.equal(projection, kept), "inputs are left alone"


# --- schedules, requests, positions -----------------------------------------------------------------------------------


@every_case
def test_dense_by_schedule(case: Case) -> None:
    qkv, (steps, layers) = tokens(), case.schedule
    small = {"min_tokens": 211}
    moments = [(20, 7, small, True), (20, 7, {"min_tokens": 210}, False)]
    if steps is not None:
        moments += [(20, 7, steps, True), (21, 7, steps, False)]
    if layers is not None:
        moments += [(20, 4, layers, True), (20, 5, layers, False)]
    for step, layer, change, expected in moments:
        options = {**case.options, **change}
        place: Options = {"step": StepInfo(step, 50), "layer": LayerInfo(layer, 8), "options": options}
        assert check(case, qkv, **place).is_dense == expected, (step, layer, change)
        assert torch.equal(attention(*qkv, **case.arguments(GRID, **place)), dense(qkv)) == expected


@every_case
def test_two_runs_are_equal_and_draw_nothing(case: Case) -> None:
    qkv, outs = tokens(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn, state = torch.get_rng_state(), RequestCache()
        outs += [attention(*qkv, **case.arguments(GRID, step=StepInfo(index, 50), state=state)) for index in (20, 21)]
        assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])


@every_case
def test_requests_branches_and_grids_share_nothing(case: Case) -> None:
    turned = TokenLayout((7, 6, 5))

    def run(state: RequestCache, seed: int, index: int, branch: str, layout: TokenLayout = GRID) -> torch.Tensor:
        step = StepInfo(index, 50, branch=branch)
        out: torch.Tensor = attention(
            *tokens(layout, seed=10 * seed + index), **case.arguments(layout, step=step, state=state)
        )
        return out

    alone = {}
    for seed, branch in ((1, "cond"), (2, "uncond"), (3, "cond")):
        state = RequestCache()
        alone[seed] = [run(state, seed, index, branch) for index in (20, 21)]
    first, second = RequestCache(), RequestCache()
    for place, index in enumerate((20, 21)):
        assert torch.equal(run(first, 1, index, "cond"), alone[1][place])
        assert torch.equal(run(second, 3, index, "cond"), alone[3][place]), "another request"
        assert torch.equal(run(first, 2, index, "uncond"), alone[2][place]), "another branch"
    fresh = run(RequestCache(), 4, 23, "cond", turned)
    assert torch.equal(run(first, 4, 23, "cond", turned), fresh), "another grid of as many tokens"
    plans = [
        plan_attention(*tokens(layout, seed=layout.grid[0])[:2], **case.arguments(layout)) for layout in (GRID, turned)
    ]
    assert not torch.equal(*(plan.kv.block_of_token() for plan in plans)), "a cache forgot the grid"


@every_case
def test_positions_belong_to_tokens(case: Case) -> None:
    """Queries and keys are turned by where their token lies, then reordered: the mask speaks of tokens throughout."""
    q, k, v = tokens(head_dim=24)
    rotations = grid_rotations(GRID.grid, 24, torch.device("cpu"))
    turned = (rotate(q.clone(), rotations), rotate(k.clone(), rotations), v)
    plan = check(case, turned)
    packed = [in_order(x, order) for x, order in zip(turned, (plan.q.order, plan.kv.order, plan.kv.order), strict=True)]
    straight = torch.arange(GRID.num_tokens, dtype=torch.int32)
    geometries: Options = {
        name: dataclasses.replace(geometry, order=straight.expand_as(geometry.order).contiguous())
        for name, geometry in (("q", plan.q), ("kv", plan.kv))
    }
    out = block_sparse_attention(packed[0], packed[1], packed[2], dataclasses.replace(plan, **geometries)).out
    expected = attention(*turned, **case.arguments(GRID))
    torch.testing.assert_close(in_order(out, plan.q.positions()), expected, atol=1e-6, rtol=1e-6)


@every_case
@every_layout
def test_tokens_may_stand_in_tiles(case: Case, layout: TokenLayout) -> None:
    """The layout says so: of its own tiles, where the order is none to a plan of tiles, and of others."""
    qkv, text = tokens(layout), layout.num_prefix_tokens
    plan = plan_attention(*qkv[:2], **case.arguments(layout))
    own = case.options.get("tile_size", (4, 4, 4))
    for tile in (own, (2, 4, 3)):
        order = torch.arange(layout.num_tokens)
        order[text : text + layout.num_grid_tokens] = text + tile_order(layout.grid, tile)[0]
        ordered = dataclasses.replace(layout, tile=tile)
        found = check(case, tuple(x[:, order] for x in qkv), ordered)
        if not case.draws_tokens:
            assert torch.equal(found.to_dense_mask(), plan.to_dense_mask()[:, :, order][..., order])
        assert found.q.is_identity == (case.is_static and tile == own and text == 0)


@every_case
def test_the_order_inside_a_block_is_storage_alone(case: Case) -> None:
    q, k, v = tokens(AFTER)
    plan = plan_attention(q, k, **case.arguments(AFTER))
    places = {name: shuffled(geometry, 90) for name, geometry in (("q", plan.q), ("kv", plan.kv))}
    moved = dataclasses.replace(
        plan,
        q=dataclasses.replace(plan.q, order=plan.q.order.gather(1, places["q"])),
        kv=dataclasses.replace(plan.kv, order=plan.kv.order.gather(1, places["kv"])),
        row_mask=None if plan.row_mask is None else plan.row_mask[:, :, places["q"][0, :90]],
    )
    assert not torch.equal(moved.q.order, plan.q.order)
    assert torch.equal(moved.to_dense_mask(), plan.to_dense_mask())
    out, expected = (block_sparse_attention(q, k, v, of).out for of in (moved, plan))
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
