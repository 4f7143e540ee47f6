"""Normalized attention guidance (NAG) in attention layers, against its formula in float64."""

from __future__ import annotations

from typing import Any

import torch
from tables import table

from diffusion_runtime.attention import AttentionContext, LayerInfo, LocalAttention, TokenLayout, USPAttention
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance, RoleGuidance
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.parallel.interface import AttentionInputs

HEADS, HEAD_DIM = 2, 8
# Ratios on both sides of tau.
GUIDANCE = NormalizedGuidance(scale=4.0, tau=1.8, alpha=0.3, num_samples=2)
OF_ROLE = GUIDANCE.of_role("self", "self")


def drawn(batch: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, length, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def formula(positive: torch.Tensor, negative: torch.Tensor, of: RoleGuidance) -> torch.Tensor:
    """The paper's, token by token, with phi = scale - 1."""
    result = torch.empty_like(positive)
    for sample in range(positive.shape[0]):
        for token in range(positive.shape[1]):
            z = positive[sample, token]
            far = z + (of.scale - 1) * (z - negative[sample, token])
            ratio = float(far.abs().sum() / z.abs().sum())
            result[sample, token] = of.alpha * min(ratio, of.tau) / ratio * far + (1 - of.alpha) * z
    return result


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of one sample, [seq, heads, head_dim] each."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@table(
    ("values", "dtype", "bound"),
    [
        ((4.0, 1.8, 0.3), torch.float64, 1e-12),
        ((4.0, 1.8, 0.3), torch.float32, 1e-5),
        ((4.0, 1.8, 0.3), torch.bfloat16, 0.02),
        # Every token is scaled, and none.
        ((9.0, 0.5, 1.0), torch.float32, 1e-5),
        ((9.0, 1e3, 1.0), torch.float32, 1e-5),
        ((1.0, 2.5, 0.25), torch.float32, 1e-5),
    ],
)
def test_the_formula(values: tuple[float, float, float], dtype: torch.dtype, bound: float) -> None:
    guidance = RoleGuidance(*values, num_samples=2)
    positive, negative = drawn(2, 11, 1, dtype), drawn(2, 11, 2, dtype)
    expected = formula(positive.double(), negative.double(), guidance)
    found = guidance.combine(positive, negative)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < bound * expected.abs().max()


def test_tokens_that_attend_to_nothing_are_finite() -> None:
    positive, negative = drawn(2, 3, 1), drawn(2, 3, 2)
    positive[:, :2], negative[:, 0] = 0.0, 0.0
    found = OF_ROLE.combine(positive, negative)
    assert found.isfinite().all()
    assert (found[:, 0] == 0).all()


def test_keys_of_two_texts_are_met_by_each_query() -> None:
    """Cross-attention: the tokens are there once, the texts of both samples and then the negative ones; of unequal
    lengths."""
    lengths = (5, 3, 7, 2)
    q, k, v = drawn(2, 6, 1), drawn(4, 7, 2), drawn(4, 7, 3)
    context = AttentionContext(layout=TokenLayout.text(7, lengths), guidance=GUIDANCE)
    layer = LocalAttention(HEADS, HEAD_DIM)
    whole = [softmax_attention(q[at % 2], k[at, :n], v[at, :n]) for at, n in enumerate(lengths)]
    expected = formula(torch.stack(whole[:2]), torch.stack(whole[2:]), OF_ROLE)
    assert (layer(q, k, v, context) - expected).abs().max() < 1e-5
    # Keys that both samples share, such as a picture's, are no texts.
    plain = layer(q, k[:2], v[:2], context.with_layout(TokenLayout.text(7)))
    assert (
        plain - torch.stack([softmax_attention(*each) for each in zip(q, k[:2], v[:2], strict=True)])
    ).abs().max() < 1e-5
    rows = context.recorder.report().rows
    assert [(row.is_guided, row.count) for row in rows] == [(True, 1), (False, 1)]
    assert "self, guided: " in str(rows[0])


def test_each_role_has_numbers_of_its_own() -> None:
    """A role comes before its category, and that before the default; a role of scale 1 is not guided and not counted
    so. Layers of each, against the formula in float64."""
    guidance = NormalizedGuidance(
        scale=(("ltx2.audio_cross", 6.0), ("cross", 3.0), ("self", 1.0)),
        tau=(("cross", 1.2), ("default", 1.8)),
        alpha=0.3,
        num_samples=2,
    )
    expected = {
        "ltx2.audio_cross": RoleGuidance(6.0, 1.2, 0.3, 2),
        "cross": RoleGuidance(3.0, 1.2, 0.3, 2),
        "ltx2.audio_to_video": RoleGuidance(3.0, 1.2, 0.3, 2),
        "self": RoleGuidance(1.0, 1.8, 0.3, 2),
    }
    q, k, v = drawn(2, 6, 1), drawn(4, 7, 2), drawn(4, 7, 3)
    whole = torch.stack([softmax_attention(q[at % 2], k[at], v[at]) for at in range(4)])
    for role, numbers in expected.items():
        assert guidance.of_role(role, role_category(role)) == numbers
        context = AttentionContext(layout=TokenLayout.text(7), guidance=guidance)
        out = LocalAttention(HEADS, HEAD_DIM, layer=LayerInfo(role=role))(q, k, v, context)
        assert (out - formula(whole[:2], whole[2:], numbers)).abs().max() < 1e-12 or role == "self"
        (row,) = context.recorder.report().rows
        assert (row.role, row.is_guided) == (role, role != "self")
    assert (out - whole[:2]).abs().max() < 1e-12


def test_a_role_of_scale_1_meets_the_prompts_alone() -> None:
    """The call of a request without guidance, to the bit, in numbers of its kind: half the queries and half the keys;
    nothing is planned for a second text."""
    guidance, lengths = NormalizedGuidance(1.0, 2.5, 0.25, num_samples=2), (7, 7, 3, 2)
    q, k, v = (drawn(*size, dtype=torch.float32) for size in ((2, 6, 1), (4, 7, 2), (4, 7, 3)))
    mask = torch.randn(4, 1, 1, 7, generator=torch.Generator().manual_seed(4))
    layer, plain, met = LocalAttention(HEADS, HEAD_DIM), AttentionContext(), []
    run = layer._run

    def seen(inputs: AttentionInputs, *given: Any) -> Any:
        met.append((len(inputs.q), len(inputs.k), len(inputs.v)))
        return run(inputs, *given)

    layer._run = seen  # type: ignore[method-assign]
    for of_all, of_prompts in ((lengths, lengths[:2]), ((5, 3, 7, 2), (5, 3))):
        context = AttentionContext(layout=TokenLayout.text(7, of_all), guidance=guidance)
        alone = plain.with_layout(TokenLayout.text(7, of_prompts))
        assert torch.equal(layer(q, k, v, context), layer(q, k[:2], v[:2], alone))
    context = AttentionContext(layout=TokenLayout.text(7), guidance=guidance)
    assert torch.equal(layer(q, k, v, context, mask=mask), layer(q, k[:2], v[:2], mask=mask[:2]))
    assert torch.equal(layer(q, k, v, context, mask=mask[:1]), layer(q, k[:2], v[:2], mask=mask[:1]))
    assert set(met) == {(2, 2, 2)}
    assert guidance.of_role("self", "self").allocated(q, k) == ()
    assert GUIDANCE.of_role("self", "self").allocated(q, k) != ()


def test_texts_in_the_sequence_go_on_by_themselves() -> None:
    """Joint attention: 2 x 3 tokens of a grid, 2 of a reference image, then 4 of text, of which some are padding."""
    lengths = (4, 3, 2, 4)
    layout = TokenLayout(
        (1, 2, 3), num_suffix_tokens=6, valid_lengths=tuple(2 + n for n in lengths), num_given_tokens=2
    )
    q, k, v = drawn(4, 12, 1), drawn(4, 12, 2), drawn(4, 12, 3)
    context = AttentionContext(layout=layout, guidance=GUIDANCE)
    out = USPAttention(HEADS, HEAD_DIM)(q, k, v, context)
    whole = torch.stack([softmax_attention(q[at], k[at, : 8 + n], v[at, : 8 + n]) for at, n in enumerate(lengths)])
    of_pictures = formula(whole[:2, :8], whole[2:, :8], OF_ROLE)
    assert (out[:, :8] - torch.cat([of_pictures, of_pictures])).abs().max() < 1e-5
    assert (out[:, 8:] - whole[:, 8:]).abs().max() < 1e-5
    # Tokens of the grid alone, and of a text alone, meet no two texts.
    for alone in (
        TokenLayout((1, 3, 4)),
        TokenLayout.text(12),
        TokenLayout((1, 2, 3), num_suffix_tokens=6, num_given_tokens=6),
    ):
        out = USPAttention(HEADS, HEAD_DIM)(q, k, v, context.with_layout(alone))
        assert (out - torch.stack([softmax_attention(*each) for each in zip(q, k, v, strict=True)])).abs().max() < 1e-5
