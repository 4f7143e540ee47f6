"""What every sparse method must keep on a CUDA GPU; the list of invariants is in test_invariants.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sparse_oracle import CASES, Case, masked_attention, random_qkv, valid_tokens

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionSpec,
    LocalAttention,
    RequestCache,
    SparsePlan,
    StepInfo,
    TokenLayout,
    attention,
    plan_attention,
)
from diffusion_runtime.attention.sparse.tiles import tile_geometry
from diffusion_runtime.attention.sparse.vmoba import chunks_of
from diffusion_runtime.kernels.block_sparse.api import refusal

pytestmark = pytest.mark.gpu

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

GRID = TokenLayout((6, 9, 13))
# The second sample has no valid text at all.
AFTER = TokenLayout((5, 9, 13), num_suffix_tokens=40, valid_lengths=(33, 0))
BEFORE = TokenLayout((5, 9, 13), num_prefix_tokens=17, valid_lengths=(1, 17))

# The sizes of real runs, where they differ from those of the CPU's cases.
REAL_SIZES: dict[str, dict[str, Any]] = {
    "STA": {"tile_size": (6, 8, 8), "window": (1, 1, 1)},
    "V-MoBA in time": {"temporal_chunk_size": 1.5},
    "V-MoBA top in space": {"spatial_chunk_size": (3, 4)},
    "V-MoBA by head": {"st_chunk_size": (4, 6, 4)},
    "SVG2": {"svg2_num_q_centroids": 20, "svg2_num_k_centroids": 70},
}
ALL_CASES = CASES | {
    f"{name}, real sizes": dataclasses.replace(CASES[name], options={**CASES[name].options, **sizes})
    for name, sizes in REAL_SIZES.items()
}
every_case = pytest.mark.parametrize("case", ALL_CASES.values(), ids=ALL_CASES)
every_small_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_layout = pytest.mark.parametrize("layout", [GRID, AFTER, BEFORE], ids=["grid", "text after", "text before"])


def tokens(
    layout: TokenLayout, *, kv_heads: int = 2, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Tensors:
    drawn = random_qkv(layout, batch=2, num_heads=4, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, seed=seed)
    return drawn[0].cuda(), drawn[1].cuda(), drawn[2].cuda()


def check(case: Case, qkv: Tensors, layout: TokenLayout, scale: float | None = None) -> None:
    """At most three times as far from float64 as float32 that is rounded to the tokens' dtype at the end.

    For float32 itself, whose only rounding is that of the sums' order, eight roundings at least.
    """
    q, k, v = qkv
    arguments = case.arguments(layout, scale=scale)
    plan = plan_attention(q, k, **arguments)
    assert plan.device == q.device
    assert not plan.is_dense
    assert plan.density < 1
    out, lse = attention(q, k, v, return_lse=True, **arguments)
    mask = plan.to_dense_mask()
    exact, exact_lse = masked_attention(q, k, v, mask, scale)
    rounded, _ = masked_attention(q, k, v, mask, scale, torch.float32)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    valid = torch.stack([valid_tokens(layout, sample) for sample in range(2)]).cuda()
    assert not out[~valid].any(), "rows of padded text are 0"
    assert (lse.transpose(1, 2)[~valid] == float("-inf")).all()
    bound = 3 * (rounded.to(q.dtype).double() - exact).norm() / exact.norm()
    if q.dtype == torch.float32:
        bound = bound.clamp(min=8 * torch.finfo(q.dtype).eps)
    assert (out.double() - exact).norm() / exact.norm() <= bound
    lse, exact_lse = lse.transpose(1, 2)[valid], exact_lse.transpose(1, 2)[valid]
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-4)


@every_case
@every_layout
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_output_and_log_sum_exp(case: Case, layout: TokenLayout, kv_heads: int) -> None:
    check(case, tokens(layout, kv_heads=kv_heads), layout)


@every_small_case
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_head_sizes(case: Case, head_dim: int) -> None:
    check(case, tokens(AFTER, head_dim=head_dim), AFTER, scale=0.2)


@every_small_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(case: Case, dtype: torch.dtype) -> None:
    check(case, tokens(BEFORE, dtype=dtype), BEFORE)


@every_small_case
def test_strides_do_not_matter(case: Case) -> None:
    """Chunks of one projection, and heads before tokens in memory."""
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(2, AFTER.num_tokens, 8 * 64, generator=generator).cuda().bfloat16()
    q, k, v = (x.unflatten(2, (-1, 64)) for x in projection.split([256, 128, 128], dim=2))
    check(case, (q, k, v), AFTER)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(case, (turned[0], turned[1], turned[2]), AFTER)


@every_small_case
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 3), (1, 33, 61), (2, 3, 1)])
def test_any_number_of_tokens(case: Case, grid: tuple[int, int, int]) -> None:
    layout = TokenLayout(grid)
    q, k, v = tokens(layout, head_dim=64)
    plan = plan_attention(q, k, **case.arguments(layout))
    out = attention(q, k, v, **case.arguments(layout))
    exact, _ = masked_attention(q, k, v, plan.to_dense_mask())
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)


@every_case
@pytest.mark.parametrize("layout", [AFTER, BEFORE], ids=["text after", "text before"])
def test_padding_changes_nothing(case: Case, layout: TokenLayout) -> None:
    qkv = tokens(layout)
    clean = attention(*qkv, **case.arguments(layout))
    valid = torch.stack([valid_tokens(layout, sample) for sample in range(2)]).cuda()
    for x in qkv:
        x[~valid] = float("nan")
    assert torch.equal(attention(*qkv, **case.arguments(layout)), clean)


# --- the same on both devices -----------------------------------------------------------------------------------------


def assert_same_plan(cpu: SparsePlan, cuda: SparsePlan) -> None:
    """Every tensor of it to the bit, but what follows the counts, which says nothing."""
    for ours, theirs in ((cpu.q, cuda.q), (cpu.kv, cuda.kv)):
        assert torch.equal(ours.order, theirs.order.cpu())
        assert torch.equal(ours.offsets, theirs.offsets.cpu())
        assert (ours.max_block_size, ours.uniform_block_size) == (theirs.max_block_size, theirs.uniform_block_size)
    assert cpu.is_dense == cuda.is_dense
    # With row masks the lists say nothing more, and a GPU that gathers queries makes none.
    if cpu.row_mask is None:
        assert torch.equal(cpu.group_of, cuda.group_of.cpu())
        assert torch.equal(cpu.kv_count, cuda.kv_count.cpu())
        assert torch.equal(cpu.block_mask, cuda.block_mask.cpu())
    if cpu.row_mask is not None:
        assert cuda.row_mask is not None
        assert torch.equal(cpu.row_mask, cuda.row_mask.cpu())


@every_layout
@pytest.mark.parametrize("window", [(1, 1, 3), (2, 3, 3), (9, 9, 9)])
@pytest.mark.parametrize("tile", [(2, 2, 2), (4, 4, 4), (6, 8, 8)])
def test_static_plans_are_those_of_the_cpu(
    layout: TokenLayout, window: tuple[int, int, int], tile: tuple[int, int, int]
) -> None:
    """Sliding tiles, whatever the tokens; and what the other methods cut a grid into."""
    case = dataclasses.replace(CASES["STA"], options={"window": window, "tile_size": tile})
    q, k, _ = tokens(layout)
    cpu, cuda = (plan_attention(q.to(d), k.to(d), **case.arguments(layout)) for d in ("cpu", "cuda"))
    assert_same_plan(cpu, cuda)
    assert torch.equal(cpu.kv_index, cuda.kv_index.cpu())
    tiles = [tile_geometry(layout, tile, device) for device in ("cpu", "cuda")]
    assert torch.equal(tiles[0].order, tiles[1].order.cpu())
    assert torch.equal(tiles[0].offsets, tiles[1].offsets.cpu())
    for shape in (tile, 50):
        chunks = [chunks_of(layout, shape, torch.device(device)) for device in ("cpu", "cuda")]
        assert torch.equal(chunks[0].q.order, chunks[1].q.order.cpu())
        assert torch.equal(chunks[0].q.offsets, chunks[1].q.offsets.cpu())
        assert torch.equal(chunks[0].chunk_of_row, chunks[1].chunk_of_row.cpu())


@pytest.mark.parametrize("name", ["VSA", "V-MoBA top", "V-MoBA top by head"])
def test_where_arithmetic_is_exact_selections_are_those_of_the_cpu(name: str) -> None:
    """Small whole numbers in blocks of 64 tokens: means and products are exact in any order, and ties go by index."""
    layout = TokenLayout((8, 12, 16), num_suffix_tokens=9, valid_lengths=(9, 4))
    case = CASES["VSA"]
    if name != "VSA":
        group = "query_head" if name == "V-MoBA top" else "head_global"
        options = {"moba_select_mode": "topk", "spatial_topk": 3, "spatial_chunk_size": (2, 4)}
        case = dataclasses.replace(CASES["V-MoBA top in space"], options={**options, "moba_threshold_type": group})
    q, k, _ = ((4 * x).round().clamp(-8, 8) for x in tokens(layout, head_dim=64, dtype=torch.float32))
    cpu, cuda = (plan_attention(q.to(d), k.to(d), **case.arguments(layout)) for d in ("cpu", "cuda"))
    assert not cpu.is_dense
    assert_same_plan(cpu, cuda)


# --- waiting, determinism, the report ---------------------------------------------------------------------------------


@every_case
@every_layout
def test_a_warm_step_waits_for_nothing_and_repeats_to_the_bit(case: Case, layout: TokenLayout) -> None:
    steps = [tokens(layout, seed=seed) for seed in range(3)]
    outs = []
    for _ in range(2):
        state = RequestCache()
        for index, qkv in enumerate(steps):
            step = StepInfo(20 + index, 50, branch="both")
            if index == 2:
                torch.cuda.synchronize()
                try:
                    torch.cuda.set_sync_debug_mode("error")
                    out = attention(*qkv, **case.arguments(layout, step=step, state=state))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            else:
                out = attention(*qkv, **case.arguments(layout, step=step, state=state))
            outs.append(out)
    for first, second in zip(outs[:3], outs[3:], strict=True):
        assert torch.equal(first, second)


def test_the_mode_that_forbids_waiting_works() -> None:
    """Otherwise the test above would see nothing."""
    x = torch.ones(3, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", [TokenLayout((6, 16, 24)), AFTER], ids=["whole tiles", "text after"])
@pytest.mark.parametrize("name", ["STA, real sizes", "VSA", "V-MoBA in time", "SVG2"])
def test_the_report_names_the_implementation(name: str, layout: TokenLayout) -> None:
    """Whole tiles of 384 tokens without text are FlashAttention-4's where it is installed, chunks of single queries
    without text are gathered, tiles of 64 are Gluon's on Hopper; the rest is the Triton kernel's."""
    case, (q, k, v) = ALL_CASES[name], tokens(layout)
    plan = plan_attention(q, k, **case.arguments(layout))
    fastest = next(kind for kind in ("flash4", "gathered", "gluon", "triton") if refusal(kind, q, plan) is None)
    assert fastest != "flash4" or name == "STA, real sizes"
    assert (fastest == "gathered") is (name == "V-MoBA in time" and layout is not AFTER)
    layer = LocalAttention(
        4,
        128,
        num_kv_heads=2,
        layer=case.layer,
        policy=AttentionPolicy(
            config=AttentionConfig(per_role={"self": AttentionSpec(case.backend, case.options)}),
            device="cuda",
            dtype=torch.bfloat16,
            environment=None,
        ),
    )
    context = AttentionContext(layout, StepInfo(20, 50))
    out = layer(q, k, v, context)
    (row,) = context.recorder.report().rows
    assert (row.backend, row.implementation, row.count) == (case.backend, f"block-sparse {fastest}", 1)
    assert torch.equal(out, attention(q, k, v, **case.arguments(layout)))
    check(case, (q, k, v), layout)
