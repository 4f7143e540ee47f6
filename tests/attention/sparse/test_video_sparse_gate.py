"""Video Sparse Attention's gated branch, its dense steps and layers, its options, and layers that ask for a gate."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from sparse_oracle import masked_attention, random_qkv
from tables import table

from diffusion_runtime.attention import (
    AttentionConfig,
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
from diffusion_runtime.errors import ConfigError

VSA = "video_sparse_attn"
LAYOUT = TokenLayout((5, 6, 7), num_suffix_tokens=3)


def tile_of(token: int) -> int:
    t, y, x = token // 42, token // 7 % 6, token % 7
    return t // 4 * 4 + y // 4 * 2 + x // 4


def pooled_of_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = 0.25) -> torch.Tensor:
    """What the coarse branch gives each token of LAYOUT, [B, seq, H, head_dim], float64; 0 for text."""
    repeats = q.shape[2] // k.shape[2]
    tiles = [[token for token in range(210) if tile_of(token) == tile] for tile in range(8)]
    q_means, k_means, v_means = (
        torch.stack([x[:, tokens].double().mean(dim=1) for tokens in tiles], dim=2) for x in (q, k, v)
    )
    k_means, v_means = (x.repeat_interleave(repeats, dim=1) for x in (k_means, v_means))
    coarse = (scale * q_means @ k_means.transpose(2, 3)).softmax(dim=-1) @ v_means
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(210):
        out[:, token] = coarse[:, :, tile_of(token)]
    return out


def inputs(seed: int = 0, **sizes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = random_qkv(LAYOUT, seed=seed, **sizes)  # type: ignore[arg-type]
    return q, k, v, torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 100))


def run(*qkvg: torch.Tensor, step: int = 0, layer: int = 0, **options: Any) -> torch.Tensor:
    q, k, v = qkvg[:3]
    return attention(
        q,
        k,
        v,
        backend=VSA,
        options=options,
        layout=LAYOUT,
        gate=qkvg[3] if len(qkvg) == 4 else None,
        step=StepInfo(step, 10),
        layer=LayerInfo(layer, 6),
    )


# --- the gated branch -------------------------------------------------------------------------------------------------


@table("scale", [None, 0.6])
def test_gate_times_the_coarse_branch_is_added(scale: float | None) -> None:
    q, k, v, gate = inputs(batch=2, num_heads=4, num_kv_heads=2)
    options = {"sparsity": 0.6}
    out, lse = attention(q, k, v, backend=VSA, options=options, layout=LAYOUT, gate=gate, scale=scale, return_lse=True)
    mask = plan_attention(q, k, backend=VSA, options=options, layout=LAYOUT, scale=scale).to_dense_mask()
    fine, fine_lse = masked_attention(q, k, v, mask, scale=scale)
    expected = fine + gate.double() * pooled_of_tokens(q, k, v, 0.25 if scale is None else scale)
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(lse.double(), fine_lse, atol=3e-6, rtol=3e-6)


def test_the_result_is_linear_in_the_gate_and_text_has_none() -> None:
    q, k, v, gate = inputs()
    none, zero, one, two = (run(q, k, v, *g, sparsity=0.6) for g in ((), (0 * gate,), (gate,), (2 * gate,)))
    assert torch.equal(none, zero)
    assert (one - zero)[:, :210].abs().max() > 0.1
    torch.testing.assert_close(two - zero, 2 * (one - zero), atol=1e-5, rtol=1e-5)
    assert torch.equal(one[:, 210:], none[:, 210:])


def test_both_branches_of_ones_are_ones() -> None:
    q, k, v, gate = inputs()
    out = run(q, k, torch.ones_like(v), gate, sparsity=0.6)
    torch.testing.assert_close(out[:, :210], 1 + gate[:, :210], atol=1e-6, rtol=1e-6)


def test_a_gate_of_another_shape_is_refused() -> None:
    q, k, v, gate = inputs()
    with pytest.raises(ConfigError, match=r"expected a gate like q \(1, 213, 2, 16\), got \(1, 213, 1, 16\)"):
        run(q, k, v, gate[:, :, :1], sparsity=0.6)


# --- dense ------------------------------------------------------------------------------------------------------------

DENSE: list[tuple[dict[str, Any], int, int]] = [
    ({"sparsity": 0.0}, 0, 0),
    ({"sparsity": 0.9, "dense_first_steps": 3}, 2, 0),
    ({"sparsity": 0.9, "dense_layers": "0-1,-1"}, 0, 5),
    ({"sparsity": 0.9, "dense_layers": (1, 3)}, 0, 3),
    ({"sparsity": 0.9, "dense_layers": 0}, 0, 0),
    ({"sparsity": 0.9, "min_tokens": 211}, 0, 0),
]


@table(("options", "step", "layer"), DENSE)
def test_dense_is_a_sparsity_of_0(options: dict[str, Any], step: int, layer: int) -> None:
    q, k, v, gate = inputs(batch=2)
    plain = attention(q, k, v, backend="torch_sdpa", layout=LAYOUT)
    assert torch.equal(run(q, k, v, step=step, layer=layer, **options), plain)
    with_gate = run(q, k, v, gate, step=step, layer=layer, **options)
    expected = plain.double() + gate.double() * pooled_of_tokens(q, k, v)
    torch.testing.assert_close(with_gate.double(), expected, atol=3e-6, rtol=3e-6)
    where = {"step": StepInfo(step, 10), "layer": LayerInfo(layer, 6)}
    assert plan_attention(q, k, backend=VSA, options=options, layout=LAYOUT, **where).is_dense  # type: ignore[arg-type]


@table(
    ("options", "step", "layer"),
    [
        ({"dense_first_steps": 3}, 3, 0),
        ({"dense_layers": "0-1,-1"}, 0, 2),
        ({"dense_layers": ()}, 0, 0),
        ({"min_tokens": 210}, 0, 0),
    ],
)
def test_everywhere_else_it_is_sparse(options: dict[str, Any], step: int, layer: int) -> None:
    q, k, _, _ = inputs()
    plan = plan_attention(
        q,
        k,
        backend=VSA,
        options={"sparsity": 0.9, **options},
        layout=LAYOUT,
        step=StepInfo(step, 10),
        layer=LayerInfo(layer, 6),
    )
    assert not plan.is_dense
    assert (plan.kv_count == 1).all()


def test_the_report_says_why_it_was_dense_and_that_the_gate_stayed() -> None:
    q, k, v, gate = inputs()
    policy = AttentionPolicy(config=AttentionConfig.parse({"backend": VSA, "extra": {"dense_first_steps": 1}}))
    layer = LocalAttention(2, 16, policy=policy)
    context = AttentionContext(layout=LAYOUT)
    layer(q, k, v, context)
    layer(q, k, v, context, gate=gate)
    names = {row.implementation for row in context.recorder.report().rows}
    assert names == {
        "dense torch_sdpa (flash): steps 0 (dense_first_steps 1)",
        "dense torch_sdpa (flash): steps 0 (dense_first_steps 1), with the gated branch",
    }


# --- a checkpoint without a gate --------------------------------------------------------------------------------------


def test_a_missing_gate_is_said_once_a_request(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v, gate = inputs()

    def warnings(state: RequestCache, sparsity: float, *gates: torch.Tensor) -> list[str]:
        caplog.clear()
        for index in range(3):
            attention(
                q,
                k,
                v,
                backend=VSA,
                options={"sparsity": sparsity, "dense_first_steps": 1},
                layout=LAYOUT,
                step=StepInfo(index, 3),
                state=state,
                gate=gates[0] if gates else None,
            )
        return [record.message for record in caplog.records if record.levelno == logging.WARNING]

    state = RequestCache()
    said = warnings(state, 0.8)
    assert len(said) == 1
    assert "no trained gate" in said[0]
    assert "a sparsity of 0.8" in said[0]
    assert not warnings(state, 0.8)
    assert not warnings(RequestCache(), 0.0)
    assert not warnings(RequestCache(), 0.8, gate)
    assert len(warnings(RequestCache(), 0.8)) == 1


# --- options ----------------------------------------------------------------------------------------------------------


def test_both_spellings_of_sparsity_and_a_pair_list() -> None:
    q, k, v, _ = inputs()
    expected = run(q, k, v, sparsity=0.6)
    assert torch.equal(run(q, k, v, VSA_sparsity=0.6), expected)
    assert torch.equal(run(q, k, v, VSA_sparsity=0.6, sparsity=0.6), expected)
    with force_attention_backend({"backend": "VSA", "extra": {"VSA_sparsity": "0.6", "dense_layers": "3"}}):
        assert torch.equal(attention(q, k, v, layout=LAYOUT), expected)


@table(
    ("options", "message"),
    [
        ({"sparsity": 1.1}, r"sparsity must lie in \[0, 1\], got 1.1"),
        ({"sparsity": -0.1}, r"sparsity must lie in \[0, 1\]"),
        ({"sparsity": float("nan")}, "sparsity: expected float, got nan"),
        ({"VSA_sparsity": 2}, r"sparsity must lie in \[0, 1\]"),
        ({"sparsity": "much"}, "expected float, got 'much'"),
        ({"sparsity": 0.5, "VSA_sparsity": 0.6}, "two spellings of one option"),
        ({"tile_size": (8, 8, 8)}, r"one of \[4, 4, 4\], \[4, 4, 8\], \[4, 8, 8\], got \[8, 8, 8\]"),
        ({"tile_size": (4, 4)}, "tile_size: expected"),
        ({"dense_first_steps": -1}, "dense_first_steps must be 0 or more"),
        ({"dense_layers": "first"}, "expected ranges such as"),
        ({"min_tokens": -5}, "min_tokens: expected 0 or more"),
        ({"tile": 4}, "unknown option 'tile'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*inputs()[:3], **options)


@table("layout", [None, TokenLayout.text(213)])
def test_tokens_without_a_grid_are_refused(layout: TokenLayout | None) -> None:
    q, k, v, _ = inputs()
    with pytest.raises(ConfigError, match="needs to know where tokens sit"):
        attention(q, k, v, backend=VSA, options={"sparsity": 0.5}, layout=layout)


# --- layers that ask --------------------------------------------------------------------------------------------------


def test_a_layer_takes_a_gate_when_the_backend_of_the_call_does() -> None:
    config = AttentionConfig.parse({"default": VSA, "schedule": [{"steps": "0-1", "backend": "torch_sdpa"}]})
    layer = LocalAttention(2, 16, policy=AttentionPolicy(config=config, environment=None))
    x = torch.zeros(1)

    def asked(index: int) -> bool:
        return layer.takes_gate(x, AttentionContext(LAYOUT, StepInfo(index, 4)))

    assert [asked(index) for index in range(4)] == [False, False, True, True]
    with force_attention_backend("reference"):
        assert not asked(3)
    dense = LocalAttention(2, 16, policy=AttentionPolicy(environment=None))
    assert not dense.takes_gate(x)
    with force_attention_backend(VSA):
        assert dense.takes_gate(x)


def test_asking_makes_no_second_decision() -> None:
    layer = LocalAttention(2, 16, policy=AttentionPolicy(environment=None))
    q, k, v, _ = inputs()
    layer.takes_gate(q)
    decided = dict(layer.decisions._known)
    layer(q, k, v)
    layer.takes_gate(q)
    assert layer.decisions._known == decided
    assert len(decided) == 1
