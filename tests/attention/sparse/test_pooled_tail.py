"""`tail: pooled` of every sparse method, against float64 attention to the means of what a plan leaves out."""

from __future__ import annotations

from typing import Any

import torch
from sparse_oracle import CASES, Case, pooled_attention, random_qkv, valid_tokens
from tables import table

from diffusion_runtime.attention import AttentionConfig, TokenLayout, attention, plan_attention
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import LayerInfo, StepInfo

every_case = table("case", CASES.values(), ids=CASES)
LAYOUTS = {
    "grid": TokenLayout((5, 6, 7)),
    "text after": TokenLayout((3, 5, 6), num_suffix_tokens=6, valid_lengths=(2, 6)),
    "text before": TokenLayout((3, 5, 6), num_prefix_tokens=6, valid_lengths=(0, 5)),
}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tokens(layout: TokenLayout, seed: int = 0) -> Tensors:
    return random_qkv(layout, batch=2, num_heads=4, num_kv_heads=2, seed=seed)


def pooled(case: Case, layout: TokenLayout, **changes: Any) -> dict[str, Any]:
    return case.arguments(layout, options={**case.options, "tail": "pooled", **changes})


@every_case
@table("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_that_are_left_out_count_as_their_means(case: Case, layout: TokenLayout) -> None:
    """Result and log-sum-exp; padding reaches neither, and the plan keeps what it keeps without the term."""
    q, k, v = tokens(layout)
    plan = plan_attention(q, k, **pooled(case, layout))
    assert not plan.is_dense
    assert torch.equal(plan.to_dense_mask(), plan_attention(q, k, **case.arguments(layout)).to_dense_mask())
    expected, expected_lse = pooled_attention(q, k, v, plan)
    valid = torch.stack([valid_tokens(layout, sample) for sample in range(2)])
    for x in (q, k, v):
        x[~valid] = torch.nan
    out, lse = attention(q, k, v, return_lse=True, **pooled(case, layout))
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(lse.double(), expected_lse, atol=5e-6, rtol=5e-6)
    assert not torch.allclose(out, attention(q, k, v, **case.arguments(layout)), atol=1e-2)


@every_case
def test_a_plan_that_leaves_nothing_out_stays_the_dense_backend(case: Case) -> None:
    layout = LAYOUTS["grid"]
    q, k, v = tokens(layout)
    for change in case.full:
        out = attention(q, k, v, **pooled(case, layout, **change))
        assert torch.equal(out, attention(q, k, v, backend="torch_sdpa", layout=layout))


@every_case
def test_every_key_counts(case: Case) -> None:
    """Of a value that is far from all others, in any block, something reaches every query."""
    layout = LAYOUTS["grid"]
    q, k, v = tokens(layout)
    before = attention(q, k, v, **pooled(case, layout))
    v[:, 150] = 1e6
    assert (attention(q, k, v, **pooled(case, layout)) - before > 1).all()


def test_a_gated_branch_is_added_to_the_term() -> None:
    layout, case = LAYOUTS["text after"], CASES["VSA"]
    q, k, v = tokens(layout)
    gate = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    added = [
        attention(q, k, v, gate=gate, **arguments) - attention(q, k, v, **arguments)
        for arguments in (pooled(case, layout), case.arguments(layout))
    ]
    torch.testing.assert_close(*added, atol=2e-6, rtol=2e-6)
    assert added[0].abs().max() > 0.1


def test_the_report_says_so() -> None:
    layout = LAYOUTS["grid"]
    choice = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.6, "tail": "pooled"}}
    policy = AttentionPolicy(config=AttentionConfig.parse(choice), environment=None)
    context = AttentionContext(layout, StepInfo(20, 50))
    q, k, v = random_qkv(layout, num_heads=2)
    LocalAttention(2, 16, layer=LayerInfo(1, 8), policy=policy)(q, k, v, context)
    assert [row.implementation for row in context.recorder.report().rows] == ["block-sparse reference, pooled tail"]
