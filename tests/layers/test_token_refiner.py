"""The token refiner beside what the transformers' parity tests see: empty texts, and what is kept between steps."""

from __future__ import annotations

import pytest
import torch

from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.layers.token_refiner import TokenRefiner


@pytest.fixture
def refiner() -> TokenRefiner:
    torch.manual_seed(0)
    module = TokenRefiner(12, 2, 8, 2, num_waves=16, role="cross", name="refiner", policy=AttentionPolicy())
    return module.requires_grad_(False).eval()


def test_padding_changes_nothing_and_is_cut_off(refiner: TokenRefiner) -> None:
    text, timestep = torch.randn(2, 6, 12), torch.tensor([500.0, 20.0])
    noisy = text.clone()
    noisy[0, 4:] = 9.0
    noisy[1, 2:] = -9.0
    kept, other = (refiner.prepare(x, (4, 2)) for x in (text, noisy))
    assert kept.tokens.shape == (2, 4, 16)
    assert torch.equal(kept.mean, other.mean)
    refined, others = (refiner(x, timestep, AttentionContext()) for x in (kept, other))
    assert torch.equal(refined[0], others[0])
    assert torch.equal(refined[1, :2], others[1, :2])
    alone = refiner(refiner.prepare(text[1:], (2,)), timestep[1:], AttentionContext())
    assert (alone[0] - refined[1, :2]).abs().max() < 1e-5


def test_an_empty_text_gives_numbers(refiner: TokenRefiner) -> None:
    text, timestep = torch.randn(2, 3, 12), torch.tensor([500.0, 20.0])
    together = refiner(refiner.prepare(text, (3, 0)), timestep, AttentionContext())
    alone = refiner(refiner.prepare(text[:1], (3,)), timestep[:1], AttentionContext())
    assert together.isfinite().all()
    assert (together[0] - alone[0]).abs().max() < 1e-5
    assert refiner(refiner.prepare(text[:1], (0,)), timestep[:1], AttentionContext()).isfinite().all()


def test_what_was_prepared_serves_every_step(refiner: TokenRefiner) -> None:
    prepared = refiner.prepare(torch.randn(1, 3, 12), (3,))
    before = prepared.tokens.clone()
    first, second = (refiner(prepared, torch.tensor([time]), AttentionContext()) for time in (900.0, 900.0))
    assert torch.equal(first, second)
    assert torch.equal(prepared.tokens, before)
    assert not torch.equal(first, refiner(prepared, torch.tensor([100.0]), AttentionContext()))
