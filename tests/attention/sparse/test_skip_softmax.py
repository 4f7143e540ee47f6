"""Skip-softmax: the reference against the definition key by key, its bound, who refuses it, and the report."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sparse_oracle import random_qkv
from sparse_plans import row_mask_plan, tile_plan

from diffusion_runtime.attention import TokenLayout, attention
from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention, refusal
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_skipping_reference
from diffusion_runtime.kernels.block_sparse.skipping import SkipRule
from diffusion_runtime.report.attention_report import SkipRow

GRID = TokenLayout((4, 8, 8))
THRESHOLD = 0.01


def peaked(layout: TokenLayout, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """q, k, v whose scores differ from frame to frame by far more than ln(1 / THRESHOLD)."""
    q, k, v = random_qkv(layout, batch=1, num_heads=2, head_dim=16, dtype=dtype)
    frame = torch.zeros(layout.num_tokens, dtype=torch.long)
    frame[: layout.num_grid_tokens] = torch.arange(layout.num_grid_tokens) // (layout.num_grid_tokens // 4)
    return q * 0.2 + 2, k * 0.2 + torch.tensor([1.0, 2.0, 0.0, 1.5], dtype=dtype)[frame][:, None, None], v


def visit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: SkipRule) -> tuple[torch.Tensor, int]:
    """The online softmax over one block that holds all tokens, one tile, head and piece after the other; and how many
    pieces were skipped. q, k, v: [seq, heads, head_dim]."""
    out, num_skipped = torch.zeros_like(q), 0
    for head in range(q.shape[1]):
        for start in range(0, q.shape[0], rule.rows):
            rows = slice(start, start + rule.rows)
            largest = torch.full_like(q[rows, head, 0], -math.inf)
            total, acc = torch.zeros_like(largest), torch.zeros_like(q[rows, head])
            for first in range(0, k.shape[0], rule.piece):
                keys = slice(first, first + rule.piece)
                scores = q[rows, head] @ k[keys, head].T / math.sqrt(q.shape[2])
                top = scores.max(1).values
                is_whole = first + rule.piece <= k.shape[0]
                if is_whole and bool((largest - top > math.log(1 / rule.threshold)).all()):
                    num_skipped += 1
                    continue
                moved = torch.maximum(largest, top)
                weights, kept = (scores - moved[:, None]).exp(), (largest - moved).exp()
                total, acc = total * kept + weights.sum(1), acc * kept[:, None] + weights @ v[keys, head]
                largest = moved
            out[rows, head] = acc / total[:, None]
    return out, num_skipped


def test_the_reference_visits_as_the_definition_does() -> None:
    layout = TokenLayout((4, 5, 11))
    q, k, v = peaked(layout, torch.float64)
    result = attention(q, k, v, backend="skip_softmax", options={"skip_threshold": THRESHOLD}, layout=layout)
    # Float64 has the tiles of float32.
    expected, num_skipped = visit(q[0], k[0], v[0], SkipRule(THRESHOLD, 64, 32))
    assert num_skipped > 4
    torch.testing.assert_close(result[0], expected, rtol=1e-12, atol=1e-12)


def test_what_is_left_out_is_within_the_bound() -> None:
    q, k, v = peaked(GRID, torch.float64)
    arguments: dict[str, Any] = {"backend": "skip_softmax", "layout": GRID, "return_lse": True}
    exact, exact_lse = attention(q, k, v, backend="reference", return_lse=True)
    previous = 0.0
    for threshold in (1e-6, 1e-3, 0.1, 0.9):
        out, lse = attention(q, k, v, options={"skip_threshold": threshold}, **arguments)
        bound = math.log1p(GRID.num_tokens * threshold)
        missing = float((exact_lse - lse).max())
        assert previous <= missing + 1e-6
        assert missing <= bound + 1e-6
        assert float((out - exact).abs().max()) <= 2 * float(v.abs().max()) * -math.expm1(-bound)
        previous = missing
    assert previous > 1e-3, "the largest threshold skips something that counts"


def test_blocks_are_cut_as_the_kernel_cuts_them() -> None:
    """Runs of adjacent blocks where blocks may be longer than a piece, block by block where not; rests are no piece."""
    positions = torch.tensor([*range(0, 10), *range(12, 20), *range(20, 23)])
    blocks = torch.tensor([*[0] * 10, *[2] * 8, *[3] * 3])
    rule = SkipRule(THRESHOLD, 16, 4)
    whole, rest = rule.split(positions, blocks, merges=True)
    assert whole.tolist() == [*range(0, 8), *range(12, 20)]
    assert rest.tolist() == [8, 9, 20, 21, 22]
    whole, rest = rule.split(positions[10:], blocks[10:], merges=False)
    assert whole.tolist() == list(range(12, 20))
    assert rest.tolist() == [20, 21, 22]
    assert [part.numel() for part in rule.split(positions[:0], blocks[:0], merges=True)] == [0, 0]


def test_text_is_never_skipped_and_skips_nothing() -> None:
    layout = TokenLayout((4, 8, 8), num_suffix_tokens=70, valid_lengths=(66,))
    q, k, v = peaked(layout)
    k[:, 256:] = -4.0
    options = {"skip_threshold": THRESHOLD}
    out, lse = attention(q, k, v, backend="skip_softmax", options=options, layout=layout, return_lse=True)
    v[:, 256 : 256 + 66] = torch.nan
    seen = attention(q, k, v, backend="skip_softmax", options=options, layout=layout)
    assert seen[:, : 256 + 66].isnan().all(), "all valid text is attended to by all"
    exact, exact_lse = attention(q, k, v.nan_to_num(), backend="reference", layout=layout, return_lse=True)
    torch.testing.assert_close(lse[..., 256 : 256 + 66], exact_lse[..., 256 : 256 + 66])
    assert (exact_lse - lse)[..., :256].max() > 0
    assert out.shape == exact.shape


def test_implementations_that_cannot_skip_say_so() -> None:
    layout = TokenLayout((3, 5, 6))
    plan = row_mask_plan(layout, (2, 3, 4), heads=2, kv_heads=2)
    q, k, v = random_qkv(layout, num_heads=2)
    with pytest.raises(ConfigError, match="row masks, which are computed chunk by chunk"):
        block_sparse_attention(q, k, v, plan, skip_threshold=0.1)
    plan = tile_plan(layout, (2, 4, 4), heads=2, kv_heads=2)
    for implementation, reason in (("flash4", "skips no keys"), ("gathered", "takes plans with row masks")):
        assert reason in str(refusal(implementation, q, plan, 0.1))
        with pytest.raises(ConfigError, match=reason):
            block_sparse_attention(q, k, v, plan, implementation=implementation, skip_threshold=0.1)
    for threshold in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match=r"skip_threshold: expected a number in \[0, 1\)"):
            block_sparse_attention(q, k, v, plan, skip_threshold=threshold)


def test_the_report_states_the_share_of_each_layer() -> None:
    q, k, v = peaked(GRID)
    options = {"skip_threshold": THRESHOLD}
    policy = AttentionPolicy(
        config=AttentionConfig.parse({"backend": "skip_softmax", "extra": options}), environment=None
    )
    context = AttentionContext(GRID)
    for index in range(2):
        layer = LocalAttention(2, 16, policy=policy, layer=LayerInfo(index, 2))
        for step in range(2):
            # Nothing is skipped in the second layer, whose keys are all alike.
            keys = k if index == 0 else torch.zeros_like(k)
            layer(q, keys, v, AttentionContext(GRID, StepInfo(step, 2), context.state, context.recorder))
    report = context.recorder.report()
    _, num_skipped = visit(q[0], k[0], v[0], SkipRule(THRESHOLD, 64, 32))
    # Two heads, four tiles of 64 queries and eight pieces of 32 keys, in two steps.
    assert report.skipped == (SkipRow("self", 0, 128, 2 * num_skipped), SkipRow("self", 1, 128, 0))
    share = num_skipped / 128
    assert f"self: softmax skipped for {share:.1%} of the pairs" in str(report)
    assert f"(layer 1: 0.0%, layer 0: {2 * share:.1%})" in str(report)
    assert report.to_dict()["skipped"][0] == {
        **{"role": "self", "layer": 0, "num_visited": 128, "num_skipped": 2 * num_skipped, "share": 2 * share}
    }
    assert {row.implementation for row in report.rows} == {"block-sparse reference, weights below 0.01 skipped"}


def test_the_other_methods_skip_among_what_they_keep() -> None:
    q, k, v = peaked(GRID)
    plan = tile_plan(GRID, (4, 8, 8), heads=2, kv_heads=2)
    result = block_sparse_attention(q, k, v, plan, skip_threshold=THRESHOLD)
    _, _, counts = block_sparse_skipping_reference(q, k, v, plan, scale=0.25, rule=SkipRule(THRESHOLD, 64, 32))
    assert result.skip_counts is not None
    assert result.skip_counts.tolist() == counts.tolist()
    assert counts[0] > 0
    for backend, options in (
        ("sliding_tile_attn", {"window": [1, 3, 3], "tile_size": [2, 4, 4]}),
        ("video_sparse_attn", {"sparsity": 0.5, "tile_size": [4, 4, 4]}),
        ("sparse_video_gen_2_attn", {"svg2_num_q_centroids": 2, "svg2_num_k_centroids": 2, "svg2_first_times_fp": 0.0}),
    ):
        arguments: dict[str, Any] = {"backend": backend, "layout": GRID, "layer": LayerInfo(7, 8), "return_lse": True}
        plain, plain_lse = attention(q, k, v, options=options, **arguments)
        out, lse = attention(q, k, v, options={**options, "skip_threshold": 0.5}, **arguments)
        assert (lse <= plain_lse + 1e-5).all(), backend
        assert not torch.equal(out, plain), backend
