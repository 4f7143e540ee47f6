"""The noise depends on the seed alone."""

from __future__ import annotations

import torch
from diffusers.utils.torch_utils import randn_tensor

from diffusion_runtime.denoising.noise import initial_noise

SHAPE = (16, 2, 5, 3)


def test_equals_what_diffusers_draws() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 2**63 - 1)]
    expected = randn_tensor((2, *SHAPE), generator=generators, dtype=torch.float32)
    assert torch.equal(initial_noise(SHAPE, (7, 2**63 - 1)), expected)


def test_a_seed_gives_the_same_noise_in_every_batch() -> None:
    batch = initial_noise(SHAPE, (1, 2, 3))
    assert batch.dtype == torch.float32
    assert batch.device.type == "cpu"
    assert torch.equal(batch[1:2], initial_noise(SHAPE, (2,)))
    assert not torch.equal(batch[0], batch[1])


def test_the_global_generator_plays_no_part() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first = initial_noise(SHAPE, (5,))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        assert torch.equal(initial_noise(SHAPE, (5,)), first)
