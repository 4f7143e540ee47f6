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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, sample by sample and head by head. visible: bool [batch, seq_q, seq_k]; mask: any."""
    batch, seq_q, heads, head_dim = q.shape
    out = torch.zeros(batch, seq_q, heads, head_dim, dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), float("-inf"), dtype=torch.float64)
    bias = torch.zeros(1, 1, 1, k.shape[1]) if mask is None else mask
    if bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, float("-inf"))
    bias = bias.double().expand(batch, heads, seq_q, -1)
    for b, h, i in itertools.product(range(batch), range(heads), range(seq_q)):
        keys = (visible[b, i] & (bias[b, h, i] > float("-inf"))).nonzero()[:, 0]
        if len(keys) == 0:
            continue
        kv_head = h // (heads // k.shape[2])
        scores = scale * k[b, keys, kv_head].double() @ q[b, i, h].double() + bias[b, h, i, keys]
        out[b, i, h] = torch.softmax(scores, 0) @ v[b, keys, kv_head].double()
        lse[b, h, i] = torch.logsumexp(scores, 0)
    return out, lse


def random_mask(boolean: bool, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A mask that hides half of the keys, and every key of some query where it tells queries apart."""
    seen = torch.rand(shape) < 0.5
    if shape[2] > 1:
        seen[0, -1, 2] = False
    return seen if boolean else torch.where(seen, torch.randn(shape), float("-inf")).to(dtype)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def visible_by(layout: TokenLayout | None, batch: int, seq: int, causal: bool) -> torch.Tensor:
    """bool [batch, seq, seq], True where a query may look at a key."""
    visible = torch.ones(batch, seq, seq, dtype=torch.bool)
    if layout is not None and layout.valid_lengths is not None:
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
