"""Attention written out in float64, and the padded layouts that the backends' tests walk through."""

from __future__ import annotations

import itertools

import torch

from diffusion_runtime.attention import TokenLayout

# Seventeen tokens, three samples.
LAYOUTS: dict[str, TokenLayout | None] = {
    "none": None,
    "suffix": TokenLayout((1, 3, 4), num_suffix_tokens=5, valid_lengths=(5, 2, 0)),
    "prefix": TokenLayout((1, 3, 4), num_prefix_tokens=5, valid_lengths=(5, 2, 0)),
    "equal": TokenLayout((1, 3, 4), num_prefix_tokens=5, valid_lengths=(2, 2, 2)),
    "alternating": TokenLayout((1, 3, 4), num_prefix_tokens=5, valid_lengths=(3, 0, 3)),
    "text": TokenLayout.text(17, (17, 3, 0)),
    "one word": TokenLayout.text(17, (1, 1, 1)),
}


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, sample by sample and head by head. visible: bool [batch, seq_q, seq_k]."""
    batch, seq_q, heads, head_dim = q.shape
    out = torch.zeros(batch, seq_q, heads, head_dim, dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), float("-inf"), dtype=torch.float64)
    for b, h, i in itertools.product(range(batch), range(heads), range(seq_q)):
        keys = visible[b, i].nonzero()[:, 0]
        if len(keys) == 0:
            continue
        kv_head = h // (heads // k.shape[2])
        scores = scale * k[b, keys, kv_head].double() @ q[b, i, h].double()
        out[b, i, h] = torch.softmax(scores, 0) @ v[b, keys, kv_head].double()
        lse[b, h, i] = torch.logsumexp(scores, 0)
    return out, lse


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def visible_by(layout: TokenLayout | None, batch: int, seq: int, causal: bool) -> torch.Tensor:
    """bool [batch, seq, seq], True where a query may look at a key."""
    visible = torch.ones(batch, seq, seq, dtype=torch.bool)
    if layout is not None:
        assert layout.valid_lengths is not None
        for sample, length in enumerate(layout.valid_lengths):
            first = 0 if layout.num_prefix_tokens else layout.num_grid_tokens
            visible[sample, :, first + length : first + layout.num_text_tokens] = False
    return visible.tril() if causal else visible


def assert_is_exact(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: tuple[torch.Tensor, torch.Tensor],
    bound: float = 1e-5,
) -> None:
    """out and lse against what `exact` gave; rows that see nothing are 0 and -inf to the bit."""
    expected_out, expected_lse = expected
    assert out.shape == expected_out.shape
    assert relative_error(out, expected_out) < bound
    assert (out[expected_out == 0] == 0).all()
    if lse is None:
        return
    assert lse.shape == expected_lse.shape
    assert lse.dtype == torch.float32
    assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
    finite = expected_lse > float("-inf")
    assert (lse[finite] - expected_lse[finite]).abs().max() < bound
