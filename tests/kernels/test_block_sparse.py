"""The block-sparse reference and plan against masked attention in float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from sparse_oracle import masked_attention, pooled_attention, random_qkv, valid_tokens
from sparse_plans import cluster_plan, row_mask_plan, tile_plan
from tables import table

from diffusion_runtime.attention import SparsePlan, TokenLayout
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse import flash4, gathered, gluon, triton
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention
from diffusion_runtime.kernels.block_sparse.pieces import list_tiles
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, add_branch

GRID = (5, 6, 7)
LAYOUTS = {
    "grid": TokenLayout(GRID),
    "suffix": TokenLayout(GRID, num_suffix_tokens=9, valid_lengths=(0, 7)),
    "prefix": TokenLayout(GRID, num_prefix_tokens=6, valid_lengths=(4, 6)),
    "both sides": TokenLayout(GRID, num_prefix_tokens=3, num_suffix_tokens=2),
}


def plans(layout: TokenLayout) -> dict[str, SparsePlan]:
    return {
        "tiles": tile_plan(layout, (4, 4, 4), batch=2),
        "small tiles": tile_plan(layout, (2, 3, 4), batch=2, smallest=0),
        "clusters": cluster_plan(layout, batch=2),
        "row mask": row_mask_plan(layout, (2, 3, 4), batch=2),
    }


CASES = [(place, kind) for place in LAYOUTS for kind in ("tiles", "small tiles", "clusters", "row mask")]


@table(("place", "kind"), CASES)
def test_reference_is_masked_attention(place: str, kind: str) -> None:
    layout = LAYOUTS[place]
    plan = plans(layout)[kind]
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    result = block_sparse_attention(q, k, v, plan, scale=0.3, return_lse=True, implementation="reference")
    out, lse = masked_attention(q, k, v, plan.to_dense_mask(), scale=0.3)
    assert result.lse is not None
    torch.testing.assert_close(result.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=1e-5)


@table(("place", "kind"), CASES)
def test_reference_with_a_pooled_tail_is_attention_to_means(place: str, kind: str) -> None:
    """Blocks of 0 tokens, queries that see nothing, padded text and clusters of every head's own among them."""
    layout = LAYOUTS[place]
    plan = dataclasses.replace(plans(layout)[kind], pooled_tail=True)
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2, dtype=torch.float64)
    result = block_sparse_attention(q, k, v, plan, scale=0.3, return_lse=True)
    out, lse = pooled_attention(q, k, v, plan, scale=0.3)
    assert result.lse is not None
    torch.testing.assert_close(result.out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-6, atol=1e-6)


def test_blocks_of_equal_keys_and_values_lose_nothing_by_being_pooled() -> None:
    layout = LAYOUTS["suffix"]
    plan = dataclasses.replace(plans(layout)["tiles"], pooled_tail=True)
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    for x in (k, v):
        for start, stop in itertools.pairwise(plan.kv.offsets[0].tolist()):
            tokens = plan.kv.order[0, start:stop].long()
            x[:, tokens] = x[:, tokens[:1]]
    mask = torch.stack([valid_tokens(layout, sample) for sample in range(2)])[:, None, None]
    out, _ = masked_attention(q, k, v, mask.expand(2, 4, layout.num_tokens, -1))
    rows = plan.to_dense_mask().any(dim=3).transpose(1, 2)
    pooled = block_sparse_attention(q, k, v, plan).out
    torch.testing.assert_close(pooled[rows].double(), out[rows], rtol=1e-5, atol=1e-5)


def test_a_pooled_tail_has_gradients_in_the_reference() -> None:
    layout = LAYOUTS["grid"]
    plan = dataclasses.replace(plans(layout)["tiles"], pooled_tail=True)
    inputs = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2, dtype=torch.float64)
    for x in inputs:
        x.requires_grad_()
    got = torch.autograd.grad(block_sparse_attention(*inputs, plan).out.square().sum(), inputs)
    expected = torch.autograd.grad(pooled_attention(*inputs, plan)[0].square().sum(), inputs)
    torch.testing.assert_close(got, expected)


@table("implementation", ["auto", "triton", "gluon", "gathered", "flash4"])
def test_an_implementation_without_gradients_refuses_inputs_that_require_them(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel stands in for itself here: what is asked is whether it is reached."""
    layout = LAYOUTS["grid"]
    plan = plans(layout)["tiles"]
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    pooled, gate = torch.randn(2, 4, plan.q.num_blocks, 16), torch.randn_like(q)
    for module in (triton, gluon, gathered, flash4):
        name = f"block_sparse_{module.__name__.rpartition('.')[2]}"
        monkeypatch.setattr(module, "refusal", lambda *_: None)
        monkeypatch.setattr(module, name, lambda *_, **__: (torch.zeros_like(q), torch.zeros(2, 4, q.shape[1])))

    def run() -> torch.Tensor:
        branch = PooledBranch(pooled, gate)
        return block_sparse_attention(q, k, v, plan, branch=branch, implementation=implementation).out

    run()
    for name, tensor in (("q", q), ("k", k), ("v", v), ("gate", gate), ("pooled", pooled)):
        tensor.requires_grad_()
        with pytest.raises(ConfigError, match=rf"computes no gradients, and {name} require them.*torch\.no_grad"):
            run()
        with torch.no_grad():
            run()
        tensor.requires_grad_(False)
    q.requires_grad_()
    out = block_sparse_attention(q, k, v, plan, implementation="reference").out
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.count_nonzero() > 0


@table(("place", "kind"), CASES)
def test_density_counts_the_mask(place: str, kind: str) -> None:
    layout = LAYOUTS[place]
    plan = plans(layout)[kind]
    valid = [layout.num_grid_tokens + plan.valid_text(sample) for sample in range(2)]
    expected = float(plan.to_dense_mask().sum()) / (4 * sum(count * count for count in valid))
    assert plan.density == pytest.approx(expected, rel=1e-12)


@table("kind", ["tiles", "clusters", "row mask"])
def test_heads_of_a_plan_compute_what_the_whole_plan_computes(kind: str) -> None:
    layout = LAYOUTS["suffix"]
    plan = plans(layout)[kind]
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    whole = block_sparse_attention(q, k, v, plan).out
    half = block_sparse_attention(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], plan.heads(2, 4)).out
    torch.testing.assert_close(half, whole[:, :, 2:], rtol=0, atol=1e-6)
    assert torch.equal(plan.heads(2, 4).to_dense_mask(), plan.to_dense_mask()[:, 2:])


@table("kind", ["tiles", "clusters", "row mask"])
@table("poison", [1e4, float("nan")])
def test_what_nobody_sees_changes_nothing(kind: str, poison: float) -> None:
    layout = LAYOUTS["suffix"]
    plan = plans(layout)[kind]
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=4, seed=1)
    plan = dataclasses.replace(plan, num_kv_heads=4, kv=plan.q) if kind != "clusters" else plan
    if kind == "clusters":
        k, v = k[:, :, ::2], v[:, :, ::2]
    clean = block_sparse_attention(q, k, v, plan).out
    query = 17
    mask = plan.to_dense_mask()
    repeats = plan.num_heads // plan.num_kv_heads
    k, v = k.clone(), v.clone()
    for sample in range(2):
        for head in range(plan.num_kv_heads):
            seen = mask[sample, head * repeats : (head + 1) * repeats, query].any(dim=0)
            k[sample, ~seen, head] = poison
            v[sample, ~seen, head] = poison
    poisoned = block_sparse_attention(q, k, v, plan).out
    # Query heads that share a key head see what either of them sees, so their own rows may differ by nothing else.
    if repeats == 1:
        torch.testing.assert_close(poisoned[:, query], clean[:, query], rtol=0, atol=0)
    assert not poisoned[0, layout.num_grid_tokens :].any(), "rows of padded text are 0"


def test_branch_adds_the_gated_mean_of_the_block_to_grid_queries() -> None:
    layout = LAYOUTS["prefix"]
    plan = tile_plan(layout, (4, 4, 4), batch=2)
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    pooled, gate = torch.randn(2, 4, plan.q.num_blocks, 16), torch.randn(q.shape)
    plain = block_sparse_attention(q, k, v, plan).out
    out = block_sparse_attention(q, k, v, plan, branch=PooledBranch(pooled, gate)).out
    block = plan.q.block_of_token()[0]
    for token in (0, 3, 6, 50, 215):
        added = 0 if token < 6 else gate[:, token] * pooled[:, :, block[token]]
        torch.testing.assert_close(out[:, token], plain[:, token] + added)
    assert torch.equal(add_branch(plain, plan, PooledBranch(pooled, gate)), out)


@table("kind", ["tiles", "small tiles", "clusters"])
@table(("rows", "rest_rows"), [(16, 8), (32, 16), (32, 4), (32, 0), (64, 32)])
def test_tiles_and_rests_hold_every_query_once(kind: str, rows: int, rest_rows: int) -> None:
    """As the kernel reads the tables: a tile that starts with no more than a rest left is not its own."""
    geometry = plans(LAYOUTS["grid"])[kind].q
    tiles = list_tiles(geometry, rows, rest_rows)
    for group, offsets in enumerate(geometry.offsets.tolist()):
        held = []
        for tile in range(tiles.count):
            block = tile // tiles.per_block if tiles.per_block else int(tiles.blocks[group, tile])
            start = (
                offsets[block] + tile % tiles.per_block * rows if tiles.per_block else int(tiles.starts[group, tile])
            )
            if offsets[block + 1] - start > tiles.rest_rows:
                held += range(start, min(start + rows, offsets[block + 1]))
        for first, stop in itertools.pairwise(offsets) if tiles.rest_rows else ():
            rest = first + (stop - first + rows - tiles.rest_rows - 1) // rows * rows
            assert stop - rest <= tiles.rest_rows
            held += range(rest, stop)
        assert sorted(held) == list(range(210))


def test_blocks_of_one_size_without_a_short_rest_have_no_tiles_for_rests() -> None:
    def of_size(size: int) -> BlockGeometry:
        return BlockGeometry(torch.arange(3 * size).int()[None], torch.arange(4).int()[None] * size, size, size)

    rests = {size: list_tiles(of_size(size), 128, 64).rest_rows for size in (48, 64, 128, 160, 200, 256, 300)}
    assert rests == {48: 0, 64: 0, 128: 0, 160: 64, 200: 0, 256: 0, 300: 64}


def test_values_of_one_give_one() -> None:
    layout = LAYOUTS["grid"]
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    out = block_sparse_attention(q, k, torch.ones_like(v), tile_plan(layout, (4, 4, 4), batch=2)).out
    torch.testing.assert_close(out, torch.ones_like(out))


def test_halves_merge_to_the_whole_by_their_log_sum_exp() -> None:
    layout = LAYOUTS["grid"]
    plan = tile_plan(layout, (2, 3, 4), batch=2, smallest=2)
    q, k, v = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2)
    whole = block_sparse_attention(q, k, v, plan, return_lse=True)
    first = dataclasses.replace(plan, kv_count=torch.ones_like(plan.kv_count))
    rest = dataclasses.replace(plan, kv_count=plan.kv_count - 1, kv_index=plan.kv_index[..., 1:].contiguous())
    parts = [block_sparse_attention(q, k, v, part, return_lse=True) for part in (first, rest)]
    lse = torch.stack([part.lse for part in parts if part.lse is not None])
    weights = lse.softmax(dim=0).transpose(2, 3)[..., None]
    merged = weights[0] * parts[0].out + weights[1] * parts[1].out
    torch.testing.assert_close(merged, whole.out)
    torch.testing.assert_close(lse.logsumexp(dim=0), whole.lse)


def test_tensors_that_do_not_fit_and_implementations_that_cannot_run_are_refused() -> None:
    layout = LAYOUTS["grid"]
    plan = tile_plan(layout, (4, 4, 4))
    q, k, v = random_qkv(layout, num_heads=4, num_kv_heads=2)
    with pytest.raises(ConfigError, match=r"is for q \(1, 210, 4\).*got q \(1, 209, 4, 16\)"):
        block_sparse_attention(q[:, 1:], k, v, plan)
    known = "auto, reference, triton, gluon, gathered, flash4, flashinfer"
    with pytest.raises(ConfigError, match=f"expected {known}, got 'cuda'"):
        block_sparse_attention(q, k, v, plan, implementation="cuda")
    if not torch.cuda.is_available():
        for name in ("flash4", "gluon"):
            with pytest.raises(ConfigError, match=f"'{name}' cannot run here: needs a CUDA GPU"):
                block_sparse_attention(q, k, v, plan, implementation=name)
