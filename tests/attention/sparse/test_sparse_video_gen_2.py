"""Sparse VideoGen 2 against its definition: the mask from labels and means, the output in float64."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from kmeans_oracle import cluster_means, excess
from sparse_oracle import masked_attention, random_qkv
from tables import table

from diffusion_runtime.attention import RequestCache, SparsePlan, TokenLayout, attention, plan_attention
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention

NAME = "sparse_video_gen_2_attn"
GRID = TokenLayout((4, 5, 6))
WITH_TEXT = TokenLayout((3, 5, 4), num_suffix_tokens=7)
PREFIXED = TokenLayout((2, 5, 7), num_prefix_tokens=5, num_suffix_tokens=3)
PADDED = TokenLayout((3, 5, 4), num_suffix_tokens=7, valid_lengths=(7, 3))
EMPTY_TEXT = TokenLayout((3, 5, 4), num_prefix_tokens=6, valid_lengths=(0, 4))
OPTIONS: dict[str, Any] = {
    "svg2_num_q_centroids": 6,
    "svg2_num_k_centroids": 15,
    "svg2_top_p_kmeans": 0.6,
    "svg2_min_kc_ratio": 0.1,
    "svg2_kmeans_iter_init": 4,
}


def plan_of(q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, **options: Any) -> SparsePlan:
    return plan_attention(q, k, backend=NAME, options={**OPTIONS, **options}, layout=layout)


def grid_tokens(x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """[batch * heads, S, head_dim] of x [batch, seq, heads, head_dim]."""
    return x[:, layout.num_prefix_tokens :][:, : layout.num_grid_tokens].transpose(1, 2).flatten(0, 1)


def labels_of(plan: SparsePlan, layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The clusters of grid queries [B * H, S] and keys [B * kv heads, S]."""
    grid = slice(layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_grid_tokens)
    return plan.q.block_of_token()[:, grid], plan.kv.block_of_token()[:, grid]


def mask_by_definition(
    q: torch.Tensor, k: torch.Tensor, plan: SparsePlan, layout: TokenLayout, *, ratio: float, scale: float | None = None
) -> torch.Tensor:
    """bool [B, H, N, N] from the plan's labels alone: centroids are the means of the labelled tokens, the selection is
    the rule in float64, and a query sees a key when its cluster keeps the key's cluster."""
    q_labels, k_labels = labels_of(plan, layout)
    q_points, k_points = grid_tokens(q, layout).double(), grid_tokens(k, layout).double()
    zeros = [
        torch.zeros(len(x), blocks, q.shape[3])
        for x, blocks in ((q_points, plan.q.num_blocks), (k_points, plan.kv.num_blocks))
    ]
    q_means, k_means = cluster_means(q_points, q_labels, zeros[0]), cluster_means(k_points, k_labels, zeros[1])
    mask = torch.zeros(plan.batch, plan.num_heads, layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    first = layout.num_prefix_tokens
    scale = q.shape[3] ** -0.5 if scale is None else scale
    for sample, head in itertools.product(range(plan.batch), range(plan.num_heads)):
        row = sample * plan.num_heads + head
        kv_row = sample * plan.num_kv_heads + head // (plan.num_heads // plan.num_kv_heads)
        sizes = torch.tensor([(k_labels[kv_row] == j).sum() for j in range(plan.kv.num_blocks)]).double()
        weight = sizes * torch.exp(scale * q_means[row] @ k_means[kv_row].T)
        keeps = torch.zeros(plan.q.num_blocks, plan.kv.num_blocks, dtype=torch.bool)
        for i, share in enumerate(weight / weight.sum(dim=1, keepdim=True)):
            before = 0.0
            for place, j in enumerate(sorted(range(len(share)), key=lambda j: -float(share[j]))):
                assert abs(before - OPTIONS["svg2_top_p_kmeans"]) > 1e-6, "too close to tell: take another seed"
                keeps[i, j] = before <= OPTIONS["svg2_top_p_kmeans"] or place < int(ratio * len(share))
                before += float(share[j])
        grid = slice(first, first + layout.num_grid_tokens)
        mask[sample, head, grid, grid] = keeps[q_labels[row].long()][:, k_labels[kv_row].long()]
        valid = [index for start, stop in layout.key_ranges(sample) for index in range(start, stop)]
        text = torch.tensor([index for index in valid if not grid.start <= index < grid.stop], dtype=torch.long)
        everyone = torch.tensor(valid)
        mask[sample, head, everyone[:, None], text] = True
        mask[sample, head, text[:, None], everyone] = True
    return mask


LAYOUTS = [GRID, WITH_TEXT, PREFIXED, PADDED, EMPTY_TEXT, TokenLayout((1, 1, 1)), TokenLayout((1, 7, 9))]


@table("layout", LAYOUTS)
@table("kv_heads", [4, 2, 1])
def test_mask_and_output(layout: TokenLayout, kv_heads: int) -> None:
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=kv_heads, seed=3)
    plan = plan_of(q, k, layout)
    expected = mask_by_definition(q, k, plan, layout, ratio=0.1)
    assert torch.equal(plan.to_dense_mask(), expected)
    assert not plan.is_dense
    assert layout.num_grid_tokens == 1 or plan.density < 1
    out, lse = attention(q, k, v, backend=NAME, options=OPTIONS, layout=layout, return_lse=True)
    expected_out, expected_lse = masked_attention(q, k, v, expected)
    assert (out.double() - expected_out).abs().max() < 1e-5
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse.double() - expected_lse)[finite].abs().max() < 1e-5


@table("scale", [0.02, 1.0, -0.5])
def test_the_scale_decides_the_selection_and_the_softmax(scale: float) -> None:
    q, k, v = random_qkv(GRID, seed=1)
    plan = plan_attention(q, k, backend=NAME, options=OPTIONS, layout=GRID, scale=scale)
    expected = mask_by_definition(q, k, plan, GRID, ratio=0.1, scale=scale)
    assert torch.equal(plan.to_dense_mask(), expected)
    assert not torch.equal(plan.block_mask, plan_of(q, k, GRID).block_mask)
    out = attention(q, k, v, backend=NAME, options=OPTIONS, layout=GRID, scale=scale)
    assert (out.double() - masked_attention(q, k, v, expected, scale)[0]).abs().max() < 1e-5


@table("head_dim", [64, 72, 80, 96, 128, 256])
@table("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = random_qkv(PADDED, batch=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    plan = plan_of(q, k, PADDED)
    out = attention(q, k, v, backend=NAME, options=OPTIONS, layout=PADDED)
    expected, _ = masked_attention(q, k, v, plan.to_dense_mask())
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)


def test_labels_are_those_of_k_means() -> None:
    """After enough iterations nothing moves: every token is in the cluster with the nearest mean."""
    q, k, _ = random_qkv(GRID, num_heads=3, seed=5)
    plan = plan_of(q, k, GRID, svg2_kmeans_iter_init=100)
    for x, labels, blocks in zip((q, k), labels_of(plan, GRID), (6, 15), strict=True):
        points = grid_tokens(x, GRID)
        means = cluster_means(points, labels, torch.full((3, blocks, 16), 1e6)).float()
        assert excess(points, means, labels).max() < 1e-3
        assert (labels.long().flatten().bincount() > 0).sum() > blocks // 2


@table("layout", [GRID, PREFIXED, PADDED])
def test_orders_hold_every_token_once_and_sizes_add_up(layout: TokenLayout) -> None:
    q, k, _ = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    plan = plan_of(q, k, layout)
    first, grid = layout.num_prefix_tokens, layout.num_grid_tokens
    for geometry, groups in ((plan.q, 8), (plan.kv, 4)):
        assert geometry.order.dtype == geometry.offsets.dtype == torch.int32
        assert geometry.num_groups == groups
        assert torch.equal(geometry.order.sort(dim=1).values, torch.arange(layout.num_tokens).int().expand(groups, -1))
        assert (geometry.sizes >= 0).all()
        assert (geometry.sizes.sum(dim=1) == grid).all()
        assert (geometry.sizes <= geometry.max_block_size).all()
        text = [index for index in range(layout.num_tokens) if not first <= index < first + grid]
        assert (geometry.order[:, grid:] == torch.tensor(text)).all()
        rising = geometry.order[:, 1:grid] > geometry.order[:, : grid - 1]
        starts = torch.zeros(groups, grid + 1, dtype=torch.bool).scatter_(1, geometry.offsets.long(), True)
        assert (rising | starts[:, 1:grid]).all(), "inside a cluster tokens stand in their own order"
    assert not torch.equal(plan.q.order[0], plan.q.order[1])


@table("options", [{"svg2_top_p_kmeans": 1.0}, {"svg2_min_kc_ratio": 1.0}])
def test_keeping_everything_is_dense_to_the_bit(options: dict[str, Any]) -> None:
    q, k, v = random_qkv(WITH_TEXT)
    assert plan_of(q, k, WITH_TEXT, **options).is_dense
    out = attention(q, k, v, backend=NAME, options={**OPTIONS, **options}, layout=WITH_TEXT)
    assert torch.equal(out, attention(q, k, v, backend="torch_sdpa", layout=WITH_TEXT))


@table(("num_q", "num_k"), [(1, 15), (6, 1), (1, 1), (1000, 1000), (60, 2)])
def test_few_clusters_and_more_than_there_are_tokens(num_q: int, num_k: int) -> None:
    q, k, v = random_qkv(WITH_TEXT)
    options = {**OPTIONS, "svg2_num_q_centroids": num_q, "svg2_num_k_centroids": num_k}
    plan = plan_of(q, k, WITH_TEXT, **options)
    assert (plan.q.num_blocks, plan.kv.num_blocks) == (min(num_q, 60), min(num_k, 60))
    assert (num_k == 1) == bool(plan.to_dense_mask().all())
    out = attention(q, k, v, backend=NAME, options=options, layout=WITH_TEXT)
    assert (out.double() - masked_attention(q, k, v, plan.to_dense_mask())[0]).abs().max() < 1e-5


def test_empty_clusters_do_no_harm() -> None:
    """A step of three different keys and two queries after one of many: the first and last cluster are empty too."""
    state = RequestCache()
    q, k, v = random_qkv(GRID, num_heads=8, seed=2)
    attention(q, k, v, backend=NAME, options=OPTIONS, layout=GRID, state=state)
    again = copy.deepcopy(state)
    q, k = q[:, torch.arange(120) % 2], k[:, torch.arange(120) % 3]
    plan = plan_attention(q, k, backend=NAME, options=OPTIONS, layout=GRID, state=state)
    for geometry, distinct in ((plan.q, 2), (plan.kv, 3)):
        assert (geometry.sizes > 0).sum(dim=1).max() <= distinct
        assert (geometry.sizes[:, 0] == 0).any()
        assert (geometry.sizes[:, -1] == 0).any()
    assert torch.equal(plan.to_dense_mask(), mask_by_definition(q, k, plan, GRID, ratio=0.1))
    out = attention(q, k, v, backend=NAME, options=OPTIONS, layout=GRID, state=again)
    assert (out.double() - masked_attention(q, k, v, plan.to_dense_mask())[0]).abs().max() < 1e-5


def test_the_smallest_share_of_clusters_is_kept() -> None:
    q, k, _ = random_qkv(GRID, seed=4)
    plan = plan_of(q, k, GRID, svg2_top_p_kmeans=0.0, svg2_min_kc_ratio=0.35)
    assert (plan.kv_count == int(0.35 * 15)).all()
    assert (plan_of(q, k, GRID, svg2_top_p_kmeans=0.0, svg2_min_kc_ratio=0.0).kv_count == 1).all()


def test_more_mass_sees_more() -> None:
    q, k, _ = random_qkv(GRID, seed=4)
    masks = [plan_of(q, k, GRID, svg2_top_p_kmeans=top_p).to_dense_mask() for top_p in (0.1, 0.5, 0.8, 1.0)]
    for less, more in itertools.pairwise(masks):
        assert (less <= more).all()
        assert less.sum() < more.sum()


def test_the_order_inside_a_cluster_does_not_change_the_output() -> None:
    q, k, v = random_qkv(GRID)
    plan = plan_of(q, k, GRID)
    generator = torch.Generator().manual_seed(0)

    def shuffled(geometry: Any) -> Any:
        order = geometry.order.clone()
        for row, offsets in enumerate(geometry.offsets.tolist()):
            for start, stop in itertools.pairwise(offsets):
                order[row, start:stop] = order[row, start:stop][torch.randperm(stop - start, generator=generator)]
        return dataclasses.replace(geometry, order=order)

    other = dataclasses.replace(plan, q=shuffled(plan.q), kv=shuffled(plan.kv))
    assert not torch.equal(other.q.order, plan.q.order)
    ours, theirs = (block_sparse_attention(q, k, v, x).out for x in (plan, other))
    assert (ours - theirs).abs().max() < 1e-5


def test_samples_and_heads_do_not_know_of_each_other() -> None:
    q, k, v = random_qkv(WITH_TEXT, batch=2, num_heads=4, num_kv_heads=2)
    both = attention(q, k, v, backend=NAME, options=OPTIONS, layout=WITH_TEXT)
    for sample in range(2):
        one = (x[sample : sample + 1] for x in (q, k, v))
        assert torch.equal(attention(*one, backend=NAME, options=OPTIONS, layout=WITH_TEXT)[0], both[sample])
    half = (q[:, :, 2:], k[:, :, 1:], v[:, :, 1:])
    assert torch.equal(attention(*half, backend=NAME, options=OPTIONS, layout=WITH_TEXT), both[:, :, 2:])
    repeated = (q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2))
    assert torch.equal(attention(*repeated, backend=NAME, options=OPTIONS, layout=WITH_TEXT), both)


def test_padding_and_unselected_keys_cannot_be_seen() -> None:
    q, k, v = random_qkv(PADDED, batch=2, seed=6)
    clean = attention(q, k, v, backend=NAME, options=OPTIONS, layout=PADDED)
    mask = plan_of(q, k, PADDED).to_dense_mask()
    dirty_q, dirty_k, dirty_v = q.clone(), k.clone(), v.clone()
    dirty_q[1, 63:], dirty_k[1, 63:], dirty_v[1, 63:] = float("nan"), 1e4, float("nan")
    dirty = attention(dirty_q, dirty_k, dirty_v, backend=NAME, options=OPTIONS, layout=PADDED)
    assert torch.equal(dirty[:, :63], clean[:, :63])
    assert torch.equal(dirty[0], clean[0])
    assert (dirty[1, 63:] == 0).all()
    query, key = (~mask[0, 0, :60, :60]).nonzero()[0].tolist()
    dirty_v[0, key, 0] = float("nan")
    dirty = attention(q, k, dirty_v, backend=NAME, options=OPTIONS, layout=PADDED)
    assert torch.equal(dirty[0, query, 0], clean[0, query, 0])


def test_out_is_a_mean_of_what_is_seen() -> None:
    q, k, v = random_qkv(GRID)
    ones = attention(q, k, torch.ones_like(v), backend=NAME, options=OPTIONS, layout=GRID)
    assert (ones - 1).abs().max() < 1e-5
    assert attention(q, k, v, backend=NAME, options=OPTIONS, layout=GRID).abs().max() <= v.abs().max()


@table("value", [float("nan"), float("inf")])
@table("which", ["q", "k"])
def test_a_first_clustering_of_values_that_are_not_finite_is_an_error(which: str, value: float) -> None:
    q, k, _ = random_qkv(WITH_TEXT)
    {"q": q, "k": k}[which][0, 3, 1, 2] = value
    with pytest.raises(ConfigError, match=f"expected finite values, {which} of layer 0"):
        plan_of(q, k, WITH_TEXT)


def test_it_needs_a_grid() -> None:
    q, k, v = random_qkv(GRID)
    with pytest.raises(ConfigError, match="needs to know where tokens sit"):
        attention(q, k, v, backend=NAME, options=OPTIONS)
