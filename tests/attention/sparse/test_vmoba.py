"""V-MoBA's results against float64 masked attention, and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_oracle import masked_attention, random_qkv
from tables import table

from diffusion_runtime.attention import (
    AttentionContext,
    AttentionPolicy,
    LayerInfo,
    LocalAttention,
    RequestCache,
    StepInfo,
    TokenLayout,
    attention,
    force_attention_backend,
    plan_attention,
)
from diffusion_runtime.attention.sparse.vmoba import VMobaOptions
from diffusion_runtime.errors import ConfigError

VMOBA = "vmoba_attn"
RAGGED = TokenLayout((5, 6, 7))
TEXT = TokenLayout((3, 5, 6), num_suffix_tokens=6, valid_lengths=(2, 6))
TEXT_FIRST = TokenLayout((3, 5, 6), num_prefix_tokens=6, valid_lengths=(0, 5))
OPTIONS: dict[str, Any] = {
    "temporal_chunk_size": 1.5,
    "spatial_chunk_size": (2, 3),
    "st_chunk_size": (2, 3, 4),
    "moba_threshold": 0.2,
    "first_full_step": 0,
}


def run(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], layout: TokenLayout = RAGGED, layer: int = 0, **options: Any
) -> torch.Tensor:
    return attention(*qkv, backend=VMOBA, options={**OPTIONS, **options}, layout=layout, layer=LayerInfo(layer, 6))


def mask_of(
    q: torch.Tensor, k: torch.Tensor, layout: TokenLayout = RAGGED, layer: int = 0, **options: Any
) -> torch.Tensor:
    """The plan's own mask: what the plan holds is judged in test_vmoba_selection.py."""
    return plan_attention(
        q, k, backend=VMOBA, options={**OPTIONS, **options}, layout=layout, layer=LayerInfo(layer, 6)
    ).to_dense_mask()


@table("head_dim", [64, 72, 80, 96, 128, 256])
@table("layer", [0, 1, 2])
def test_output_and_log_sum_exp(head_dim: int, layer: int) -> None:
    q, k, v = random_qkv(RAGGED, num_heads=2, num_kv_heads=1, head_dim=head_dim, seed=1)
    out, lse = attention(
        q, k, v, backend=VMOBA, options=OPTIONS, layout=RAGGED, layer=LayerInfo(layer, 6), return_lse=True
    )
    mask = mask_of(q, k, layer=layer)
    assert 0.1 < mask.double().mean() < 0.9
    expected, expected_lse = masked_attention(q, k, v, mask)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=2e-6)


@table("layout", [TEXT, TEXT_FIRST], ids=["text after", "text before"])
@table("kind", ["query_head", "head_global", "overall", "block"])
def test_text_of_unequal_lengths(layout: TokenLayout, kind: str) -> None:
    q, k, v = random_qkv(layout, batch=2, num_heads=2, seed=2)
    options = {**OPTIONS, "moba_threshold_type": kind}
    out = attention(q, k, v, backend=VMOBA, options=options, layout=layout, scale=0.4)
    mask = mask_of(q, k, layout, moba_threshold_type=kind)
    first = layout.num_prefix_tokens
    for b in range(2):
        valid = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for start, stop in layout.key_ranges(b):
            valid[start:stop] = True
        text = [i for i in range(layout.num_tokens) if not first <= i < first + 90]
        assert torch.equal(mask[b, 0][text], valid[text, None] & valid)
        assert torch.equal(mask[b, 0][:, text].T, valid[text, None] & valid)
    expected, _ = masked_attention(q, k, v, mask, scale=0.4)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    for b in range(2):
        padding = ~mask[b, 0].any(dim=0)
        for x in (q, k, v):
            x[b, padding] = float("nan")
    assert padding.any() or layout is TEXT
    assert torch.equal(attention(q, k, v, backend=VMOBA, options=options, layout=layout, scale=0.4), out)


def test_the_scale_changes_weights_and_not_the_choice() -> None:
    q, k, _ = random_qkv(RAGGED)
    plans = [
        plan_attention(q, k, backend=VMOBA, options=OPTIONS, layout=RAGGED, scale=scale).to_dense_mask()
        for scale in (None, 2.0, -1.0)
    ]
    assert torch.equal(plans[0], plans[1])
    assert torch.equal(plans[0], plans[2])


@table("layer", [0, 1, 2])
def test_top_1_is_the_own_chunk_alone(layer: int) -> None:
    q, k, v = random_qkv(RAGGED, batch=2)
    top_1 = {"moba_select_mode": "topk", "temporal_topk": 1, "spatial_topk": 1, "st_topk": 1}
    t, y, x = torch.meshgrid(*(torch.arange(n) for n in RAGGED.grid), indexing="ij")
    chunk = [
        torch.arange(210) // 63,
        (y // 2 * 3 + x // 3).flatten(),
        (t // 2 * 4 + y // 3 * 2 + x // 4).flatten(),
    ][layer]
    mask = (chunk[:, None] == chunk).expand(2, 2, -1, -1)
    assert torch.equal(mask_of(q, k, layer=layer, **top_1), mask)
    expected, _ = masked_attention(q, k, v, mask)
    torch.testing.assert_close(run((q, k, v), layer=layer, **top_1).double(), expected, atol=2e-6, rtol=2e-6)


@table(
    "options",
    [
        {"moba_select_mode": "topk", "temporal_topk": 4},
        {"moba_threshold": 1.0},
        {"first_full_step": 1},
        {"first_full_layer": 1},
        {"min_tokens": 211},
        {"temporal_chunk_size": 5},
    ],
)
def test_dense_is_the_dense_backend_bit_for_bit(options: dict[str, Any]) -> None:
    q, k, v = random_qkv(RAGGED, batch=2, num_heads=4, num_kv_heads=2)
    plain = attention(q, k, v, backend="torch_sdpa", layout=RAGGED)
    assert torch.equal(run((q, k, v), **options), plain)


@table("group", ["query_head", "head_global", "overall", "block"])
def test_a_share_that_only_everything_reaches_is_dense(group: str) -> None:
    q, k, v = random_qkv(RAGGED)
    almost = run((q, k, v), moba_threshold=1 - 1e-12, moba_threshold_type=group)
    torch.testing.assert_close(almost, attention(q, k, v, backend="torch_sdpa"), atol=2e-6, rtol=2e-6)


def test_values_that_a_query_did_not_select_do_not_count() -> None:
    q, k, v = random_qkv(RAGGED, num_heads=1)
    mask, out = mask_of(q, k)[0, 0], run((q, k, v))
    for key in (0, 100, 209):
        poisoned = v.clone()
        poisoned[0, key] = float("nan")
        again = run((q, k, poisoned))
        seen = again[0, :, 0].isnan().any(dim=-1)
        assert torch.equal(seen, mask[:, key])
        assert 0 < seen.sum() < 210
        assert torch.equal(again[0, ~seen], out[0, ~seen])


@table("grid", [(1, 9, 10), (1, 1, 3), (2, 1, 1), (1, 1, 1)])
@table("layer", [0, 1, 2])
def test_images_and_grids_smaller_than_a_chunk(grid: tuple[int, int, int], layer: int) -> None:
    layout = TokenLayout(grid)
    q, k, v = random_qkv(layout, batch=2)
    options = {"temporal_chunk_size": 0.1}
    mask = mask_of(q, k, layout, layer, **options)
    assert mask.diagonal(dim1=2, dim2=3).all()
    expected, _ = masked_attention(q, k, v, mask)
    torch.testing.assert_close(run((q, k, v), layout, layer, **options).double(), expected, atol=2e-6, rtol=2e-6)


@table("group", ["query_head", "head_global", "overall", "block"])
def test_a_batch_equals_its_samples(group: str) -> None:
    q, k, v = random_qkv(RAGGED, batch=2, num_heads=4)
    q[1] *= 30.0
    whole = run((q, k, v), moba_threshold_type=group)
    for b in range(2):
        part = slice(b, b + 1)
        torch.testing.assert_close(run((q[part], k[part], v[part]), moba_threshold_type=group), whole[part])


def test_grouped_queries_equal_repeated_keys() -> None:
    q, k, v = random_qkv(RAGGED, batch=2, num_heads=6, num_kv_heads=2)
    repeated = (q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2))
    torch.testing.assert_close(run((q, k, v)), run(repeated))


def test_a_plan_of_some_heads_is_a_part_of_the_whole_plan() -> None:
    q, k, _ = random_qkv(RAGGED, batch=2, num_heads=4)
    whole = plan_attention(q, k, backend=VMOBA, options=OPTIONS, layout=RAGGED)
    assert torch.equal(mask_of(q[:, :, 2:], k[:, :, 2:]), whole.heads(2, 4).to_dense_mask())


@table("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_choose_in_float32(dtype: torch.dtype) -> None:
    q, k, v = random_qkv(RAGGED, dtype=dtype, seed=5)
    mask = mask_of(q, k)
    assert torch.equal(mask, mask_of(q.float(), k.float()))
    expected, _ = masked_attention(q, k, v, mask)
    tolerance = 1e-9 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    out = run((q, k, v))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_equal_calls_give_equal_bits_and_strides_do_not_matter() -> None:
    q, k, v = random_qkv(RAGGED, batch=2)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(run((q, k, v)), run((q, k, v)))
    torch.testing.assert_close(run((strided[0], strided[1], strided[2])), run((q, k, v)))
    assert torch.allclose(run((q, k, torch.ones_like(v))), torch.ones_like(v), atol=1e-6)


def test_a_layer_reports_dense_steps_and_sparse_ones() -> None:
    with force_attention_backend({"backend": "VMoBA", "extra": {**OPTIONS, "first_full_step": 2}}):
        layer = LocalAttention(2, 16, layer=LayerInfo(0, 2), policy=AttentionPolicy(environment=None))
    q, k, v = random_qkv(RAGGED)
    context = AttentionContext(RAGGED)
    for index in range(4):
        layer(q, k, v, AttentionContext(RAGGED, StepInfo(index, 4), RequestCache(), context.recorder))
    rows = [(row.backend, row.implementation, row.steps) for row in context.recorder.report().rows]
    assert rows == [
        (VMOBA, "dense torch_sdpa (flash): steps 0-1 (first_full_step 2)", "0-1"),
        (VMOBA, "block-sparse reference", "2-3"),
    ]


# --- options ----------------------------------------------------------------------------------------------------------


def test_defaults_are_the_documented_ones() -> None:
    options = VMobaOptions()
    assert (options.moba_select_mode, options.moba_threshold, options.moba_threshold_type) == (
        *("threshold", 0.25, "query_head"),
    )
    assert (options.first_full_step, options.first_full_layer) == (12, 0)
    assert (options.temporal_layer, options.spatial_layer, options.st_layer) == (1, 1, 1)
    assert (options.temporal_chunk_size, options.spatial_chunk_size, options.st_chunk_size) == (2, (3, 4), (4, 6, 4))
    assert (options.temporal_topk, options.spatial_topk, options.st_topk) == (3, 20, 15)


@table(
    ("options", "message"),
    [
        ({"temporal_chunk_size": 0}, "temporal_chunk_size must be a number of frames above 0, got 0"),
        ({"temporal_chunk_size": float("inf")}, "temporal_chunk_size: expected int .* float, got"),
        ({"temporal_chunk_size": float("nan")}, "temporal_chunk_size: expected int .* float, got"),
        ({"spatial_chunk_size": (3, 0)}, r"spatial_chunk_size must be 1 or more along every axis, got \[3, 0\]"),
        ({"spatial_chunk_size": (3, 4, 5)}, "spatial_chunk_size: expected"),
        ({"st_chunk_size": (-1, 2, 2)}, "st_chunk_size must be 1 or more"),
        ({"temporal_topk": 0}, "temporal_topk must be 1 or more, as it counts a query's own chunk, got 0"),
        ({"st_topk": 2.5}, "st_topk: expected int"),
        ({"moba_select_mode": "best"}, "expected one of 'threshold', 'topk', got 'best'"),
        ({"moba_threshold": -0.1}, "moba_threshold must be 0 or more"),
        ({"moba_threshold": float("nan")}, "moba_threshold: expected float, got nan"),
        ({"moba_threshold_type": "head"}, "'query_head', 'head_global', 'overall', 'block'"),
        ({"moba_select_mode": "topk", "moba_threshold_type": "block"}, "has no moba_threshold_type block"),
        ({"first_full_step": -1}, "first_full_step must be 0 or more"),
        ({"temporal_layer": 0, "spatial_layer": 0, "st_layer": 0}, "all are 0"),
        ({"min_tokens": -1}, "min_tokens: expected 0 or more"),
        ({"temporal_chunk": 2}, "unknown option 'temporal_chunk'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(random_qkv(RAGGED), **options)


def test_tokens_without_a_grid_are_refused() -> None:
    q, k, v = random_qkv(RAGGED)
    with pytest.raises(ConfigError, match="needs to know where tokens sit"):
        attention(q, k, v, backend=VMOBA, options=OPTIONS)
