"""Sparse VideoGen 2 over a request: what stays dense, what one step leaves to the next, and what nobody shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kmeans_oracle import cluster_means, inertia
from sparse_oracle import masked_attention, random_qkv
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
from diffusion_runtime.errors import ConfigError

NAME = "sparse_video_gen_2_attn"
GRID = TokenLayout((4, 5, 6))
OPTIONS: dict[str, Any] = {
    "svg2_num_q_centroids": 6,
    "svg2_num_k_centroids": 15,
    "svg2_top_p_kmeans": 0.6,
    "svg2_kmeans_iter_init": 3,
    "svg2_first_times_fp": 0.0,
}
FIRST, SECOND = StepInfo(0, 10), StepInfo(1, 10)


def plan_of(
    seed: int = 0,
    layout: TokenLayout = GRID,
    *,
    state: RequestCache | None = None,
    layer: LayerInfo = LayerInfo(),  # noqa: B008 (frozen)
    step: StepInfo = SECOND,
    batch: int = 1,
    heads: int = 2,
    **options: Any,
) -> SparsePlan:
    q, k, _ = random_qkv(layout, batch=batch, num_heads=heads, seed=seed)
    options = {**OPTIONS, **options}
    return plan_attention(q, k, backend=NAME, options=options, layout=layout, layer=layer, step=step, state=state)


def same(one: SparsePlan, other: SparsePlan) -> bool:
    return torch.equal(one.q.order, other.q.order) and torch.equal(one.to_dense_mask(), other.to_dense_mask())


# --- the schedule -----------------------------------------------------------------------------------------------------


@table(
    ("layers", "times", "num_layers", "num_steps", "dense_layers", "dense_steps"),
    [
        (0.03, 0.2, 40, 50, 1, 10),
        (0.03, 0.2, 30, 50, 0, 10),
        (0.03, 0.35, 40, 40, 1, 14),
        (0.0, 0.04, 60, 50, 0, 2),
        (0.0, 0.0, 40, 50, 0, 0),
        (0.03, 0.1, 60, 9, 1, 0),
        (1.0, 0.0, 3, 4, 3, 0),
        (0.0, 1.0, 3, 4, 0, 4),
    ],
)
def test_first_layers_and_first_steps_are_dense(
    layers: float, times: float, num_layers: int, num_steps: int, dense_layers: int, dense_steps: int
) -> None:
    shares = {"svg2_first_layers_fp": layers, "svg2_first_times_fp": times, "svg2_kmeans_iter_init": 0}
    for layer in {0, dense_layers - 1, dense_layers, num_layers - 1} & set(range(num_layers)):
        for step in {0, dense_steps - 1, dense_steps, num_steps - 1} & set(range(num_steps)):
            where = {"layer": LayerInfo(layer, num_layers), "step": StepInfo(step, num_steps)}
            assert plan_of(**where, **shares).is_dense == (layer < dense_layers or step < dense_steps)


def test_a_dense_call_is_the_dense_backend_to_the_bit_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = random_qkv(GRID)
    state = RequestCache()
    options = {**OPTIONS, "svg2_first_times_fp": 0.2}
    arguments: dict[str, Any] = {"backend": NAME, "layout": GRID, "state": state}
    with caplog.at_level("INFO", "diffusion_runtime.attention"):
        for index in (0, 1):
            out = attention(q, k, v, options=options, step=StepInfo(index, 10), **arguments)
            assert torch.equal(out, attention(q, k, v, backend="torch_sdpa", layout=GRID))
    assert caplog.messages == [f"{NAME} runs dense: steps 0-1 (svg2_first_times_fp 0.2)"]
    sparse = attention(q, k, v, options=options, step=StepInfo(2, 10), **arguments)
    assert not torch.allclose(sparse, out, atol=1e-3)


def test_small_grids_run_dense() -> None:
    assert plan_of(min_tokens=121).is_dense
    assert not plan_of(min_tokens=120).is_dense


# --- from step to step ------------------------------------------------------------------------------------------------


def test_a_later_step_goes_on_where_the_one_before_stopped() -> None:
    state = RequestCache()
    assert same(plan_of(state=state, step=FIRST), plan_of())
    warm = plan_of(state=state, step=SECOND, svg2_kmeans_iter_step=2)
    assert same(warm, plan_of(svg2_kmeans_iter_init=5))
    assert not same(warm, plan_of())
    assert not same(warm, plan_of(svg2_kmeans_iter_init=2)), "it does not start anew"


def test_no_iterations_keep_the_centroids() -> None:
    state = RequestCache()
    plans = [plan_of(state=state, svg2_kmeans_iter_init=0, svg2_kmeans_iter_step=0) for _ in range(2)]
    assert same(*plans)
    assert (plans[0].q.sizes.sum(dim=1) == 120).all()


def test_inertia_falls_from_step_to_step() -> None:
    q, k, _ = random_qkv(GRID, num_heads=3, seed=7)
    state, course = RequestCache(), []
    for index in range(5):
        step = StepInfo(index, 10)
        plan = plan_attention(q, k, backend=NAME, options=OPTIONS, layout=GRID, step=step, state=state)
        points, labels = q.transpose(1, 2).flatten(0, 1), plan.q.block_of_token()
        means = cluster_means(points, labels, torch.zeros(3, 6, 16))
        course.append(inertia(points, means, labels))
    assert (torch.stack(course).diff(dim=0) <= 1e-9).all()
    assert (course[-1] < course[0]).all()


def test_the_kept_centroids_have_the_dtype_of_the_tokens() -> None:
    """What is scored is what is kept: the selection is the rule on means that went through bfloat16."""
    q, k, v = random_qkv(GRID, num_heads=4, dtype=torch.bfloat16, seed=1)
    options = {**OPTIONS, "svg2_num_q_centroids": 20, "svg2_num_k_centroids": 40}
    arguments: dict[str, Any] = {"backend": NAME, "options": options, "layout": GRID, "step": SECOND, "scale": 1.0}
    plan = plan_attention(q, k, **arguments)
    means = [
        cluster_means(
            x.transpose(1, 2).flatten(0, 1), geometry.block_of_token(), torch.zeros(4, geometry.num_blocks, 16)
        )
        for x, geometry in ((q, plan.q), (k, plan.kv))
    ]
    exact, rounded = _kept(*means, plan.kv.sizes), _kept(*(x.bfloat16().double() for x in means), plan.kv.sizes)
    # The centroid of an empty cluster is an old one, and decides nothing.
    real = (plan.q.sizes > 0)[..., None] & (plan.kv.sizes > 0)[:, None]
    assert torch.equal(plan.block_mask & real, rounded & real)
    assert not torch.equal(exact & real, rounded & real)
    out = attention(q, k, v, **arguments)
    assert (out.double() - masked_attention(q, k, v, plan.to_dense_mask(), 1.0)[0]).abs().max() < 2e-2


def _kept(q_means: torch.Tensor, k_means: torch.Tensor, k_sizes: torch.Tensor) -> torch.Tensor:
    mass = torch.softmax(q_means @ k_means.transpose(1, 2) + k_sizes.double().log()[:, None], dim=-1)
    share, order = mass.sort(dim=-1, descending=True)
    before = share.cumsum(-1) - share
    first = torch.arange(share.shape[-1]) < int(0.1 * share.shape[-1])
    assert ((before - 0.6).abs() > 1e-6).all(), "too close to tell: take another seed"
    return torch.zeros_like(share, dtype=torch.bool).scatter_(-1, order, (before <= 0.6) | first)


def test_dense_first_steps_cluster_too_when_asked() -> None:
    options = {"svg2_first_times_fp": 0.2, "svg2_kmeans_iter_step": 1}
    for asked, iterations in ((False, 3), (True, 5)):
        state = RequestCache()
        for index in (0, 1):
            step = StepInfo(index, 10)
            assert plan_of(state=state, step=step, svg2_zero_step_kmeans_init=asked, **options).is_dense
        third = plan_of(state=state, step=StepInfo(2, 10), svg2_zero_step_kmeans_init=asked, **options)
        assert same(third, plan_of(svg2_kmeans_iter_init=iterations))


def test_attention_and_its_plan_leave_the_same_behind() -> None:
    q, k, v = random_qkv(GRID)
    options = {**OPTIONS, "svg2_first_times_fp": 0.1, "svg2_zero_step_kmeans_init": True}
    states = [RequestCache(), RequestCache()]
    for index in range(3):
        step = StepInfo(index, 10)
        arguments: dict[str, Any] = {"backend": NAME, "options": options, "layout": GRID, "step": step}
        plan = plan_attention(q, k, state=states[0], **arguments)
        out = attention(q, k, v, state=states[1], **arguments)
        expected, _ = masked_attention(q, k, v, plan.to_dense_mask())
        assert plan.is_dense == (index == 0)
        assert (out.double() - expected).abs().max() < 1e-5


@table("skipped", [{"min_tokens": 121}, {"svg2_first_layers_fp": 1.0}, {"svg2_top_p_kmeans": 1.0}])
def test_what_never_becomes_sparse_is_not_clustered(skipped: dict[str, Any]) -> None:
    """A NaN would be seen."""
    q, k, _ = random_qkv(GRID)
    q[0, 0, 0, 0] = float("nan")
    options = {**OPTIONS, "svg2_first_times_fp": 1.0, "svg2_zero_step_kmeans_init": True}
    with pytest.raises(ConfigError, match="expected finite values"):
        plan_attention(q, k, backend=NAME, options=options, layout=GRID)
    assert plan_attention(q, k, backend=NAME, options={**options, **skipped}, layout=GRID).is_dense


def test_a_nan_after_the_first_step_neither_hangs_nor_leaves_the_range() -> None:
    q, k, v = random_qkv(GRID)
    state = RequestCache()
    arguments: dict[str, Any] = {"backend": NAME, "options": OPTIONS, "layout": GRID, "state": state}
    attention(q, k, v, step=FIRST, **arguments)
    q[0, 3, 0], k[0, 5, 1, 2] = float("nan"), float("inf")
    plan = plan_attention(q, k, step=SECOND, **arguments)
    assert (plan.q.order.sort(dim=1).values == torch.arange(120)).all()
    assert (plan.q.sizes.sum(dim=1) == 120).all()
    assert (plan.kv_count >= 1).all()
    assert ((plan.kv_index >= 0) & (plan.kv_index < 15)).all()
    assert attention(q, k, v, step=SECOND, **arguments)[0, 3, 0].isnan().all()


# --- what nobody shares -----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_plan_and_another_does_not() -> None:
    assert same(plan_of(), plan_of())
    torch.manual_seed(123)
    assert same(plan_of(), plan_of(svg2_seed=0))
    assert not same(plan_of(), plan_of(svg2_seed=1))
    assert not same(plan_of(), plan_of(layer=LayerInfo(1, 2), svg2_first_layers_fp=0.0))


@table(
    ("layer", "step"),
    [
        (LayerInfo(), dataclasses.replace(SECOND, branch="uncond")),
        (LayerInfo(), dataclasses.replace(SECOND, expert=1)),
        (LayerInfo(1, 2), SECOND),
    ],
    ids=["branch", "expert", "layer"],
)
def test_branches_experts_and_layers_start_on_their_own(layer: LayerInfo, step: StepInfo) -> None:
    state = RequestCache()
    plan_of(1, state=state, step=FIRST)
    assert same(plan_of(state=state, layer=layer, step=step), plan_of(layer=layer, step=step))
    warm = plan_of(1, state=state, step=SECOND)
    assert same(warm, plan_of(1, svg2_kmeans_iter_init=5)), "the other one did not move these centroids"


def test_requests_share_nothing() -> None:
    states = [RequestCache(), RequestCache()]
    for state in states:
        plan_of(1, state=state)
    plan_of(2, state=states[0])
    assert same(plan_of(state=states[1]), _after(1, 0))


def _after(*seeds: int) -> SparsePlan:
    state = RequestCache()
    return [plan_of(seed, state=state) for seed in seeds][-1]


def test_both_branches_at_once_are_the_two_one_by_one() -> None:
    q, k, v = random_qkv(GRID, batch=2)
    both, single = RequestCache(), RequestCache()
    for index in range(3):
        arguments: dict[str, Any] = {"backend": NAME, "options": OPTIONS, "layout": GRID}
        out = attention(q, k, v, state=both, step=StepInfo(index, 10, branch="both"), **arguments)
        for sample, branch in enumerate(("cond", "uncond")):
            one = (x[sample : sample + 1] for x in (q, k, v))
            alone = attention(*one, state=single, step=StepInfo(index, 10, branch=branch), **arguments)
            assert torch.equal(alone[0], out[sample])


@table(
    "changed",
    [{"layout": TokenLayout((5, 4, 6))}, {"batch": 2}, {"heads": 3}, {"svg2_num_k_centroids": 14}, {"svg2_seed": 3}],
)
def test_another_shape_starts_anew(changed: dict[str, Any]) -> None:
    state = RequestCache()
    plan_of(state=state)
    assert same(plan_of(state=state, **changed), plan_of(**changed))


def test_a_request_with_gradients_keeps_no_graph() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(GRID))
    state = RequestCache()
    for index in (0, 1):
        out = attention(q, k, v, backend=NAME, options=OPTIONS, layout=GRID, state=state, step=StepInfo(index, 10))
        out.sum().backward()
