"""The samplers that add fresh noise at every step, against their formula in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.request.samplers import SAMPLERS

# The others that add noise are in test_sigma_samplers.py.
NOISY = [name for name, sampler in SAMPLERS.items() if "dmd:" in sampler.implementation]
SHAPE = (4, 2, 3, 5)
FASTWAN = (1.0, 0.757, 0.522)


def velocity(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
    assert step.sigma is not None
    return torch.sin(3 * latents) + 0.5 * latents * step.sigma


def run(name: str, levels: Sequence[float], seeds: Sequence[int]) -> torch.Tensor:
    noise = SampleNoise(SHAPE, seeds)
    sampler = build_sampler(name, len(levels), 1.0, {}, tuple(levels))
    return sampler.sample(noise.draw(), velocity, draw_noise=noise.draw)


def by_formula(levels: Sequence[float], seed: int, start: float) -> torch.Tensor:
    """Written out in float64. start: what the initial noise is multiplied by."""
    generator = torch.Generator().manual_seed(seed)

    def fresh() -> torch.Tensor:
        return torch.randn((1, *SHAPE), generator=generator).double()

    x = start * fresh()
    for index, sigma in enumerate(levels):
        x = x - sigma * velocity(x, StepInfo(sigma=sigma))
        if index + 1 < len(levels):
            following = levels[index + 1]
            x = (1 - following) * x + following * fresh()
    return x


@table("name", NOISY)
@table("levels", [(1.0,), FASTWAN, (0.9876543, 0.9337811, 0.8528954, 0.6089790)])
def test_latents_equal_the_formula(name: str, levels: tuple[float, ...]) -> None:
    expected = by_formula(levels, 7, start=levels[0] if name == "rcm" else 1.0)
    result = run(name, levels, [7])
    assert result.dtype == torch.float32
    # float32 latents at every prediction, and derivatives of the velocity up to 3 at each of four steps.
    torch.testing.assert_close(result.double(), expected, atol=1e-5 if len(levels) > 1 else 1e-6, rtol=0)


@table("name", NOISY)
def test_each_step_equals_the_formula_given_its_velocity(name: str) -> None:
    """Roundings of the prediction aside: within 1e-6 over all steps."""
    recorded: list[torch.Tensor] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert latents.dtype == torch.float32
        recorded.append(velocity(latents, step).double())
        return recorded[-1].float()

    levels = (0.9, 0.7, 0.4, 0.1)
    noise = SampleNoise(SHAPE, [3])
    sampler = build_sampler(name, 4, 1.0, {}, levels)
    result = sampler.sample(noise.draw(), predict, draw_noise=noise.draw)
    again = SampleNoise(SHAPE, [3])
    x = again.draw().double() * (levels[0] if name == "rcm" else 1.0)
    for index, sigma in enumerate(levels):
        x = x - sigma * recorded[index].float().double()
        if index < 3:
            x = (1 - levels[index + 1]) * x + levels[index + 1] * again.draw().double()
    assert (result.double() - x).abs().max() < 1e-6


@table("name", NOISY)
def test_a_batch_of_seeds_equals_single_runs(name: str) -> None:
    together = run(name, FASTWAN, [5, 6, 5])
    for index, seed in enumerate((5, 6, 5)):
        assert torch.equal(together[index : index + 1], run(name, FASTWAN, [seed]))


@table("name", NOISY)
def test_steps_say_where_they_are(name: str) -> None:
    asked: list[StepInfo] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        asked.append(step)
        return latents

    noise = SampleNoise(SHAPE, [1])
    seen: list[int] = []
    sampler = build_sampler(name, 3, 5.0, {"num_train_timesteps": 500})
    sampler.sample(noise.draw(), predict, lambda step, _: seen.append(step.index), noise.draw)
    expected = [5 * t / (1 + 4 * t) for t in (1.0, 2 / 3, 1 / 3)]
    assert seen == [0, 1, 2]
    assert all(math.isclose(step.sigma or 0.0, sigma) for step, sigma in zip(asked, expected, strict=True))
    assert [step.timestep for step in asked] == [500 * (step.sigma or 0.0) for step in asked]
    assert [step.next_timestep for step in asked] == [*(step.timestep for step in asked[1:]), 0.0]


def test_fresh_noise_is_other_numbers_and_the_first_is_the_initial_noise() -> None:
    noise = SampleNoise(SHAPE, [4])
    first, second = noise.draw(), noise.draw()
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.randn((1, *SHAPE), generator=torch.Generator().manual_seed(4)))
    assert abs(float((first * second).mean())) < 0.3
