"""Denoising from noised latents, in part: for every sampler, without a model."""

from __future__ import annotations

from typing import Any, cast

import torch
from heun_sampler import NAME as HEUN
from heun_sampler import heun
from tables import table

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.generation.denoising_stages import PlainStage
from diffusion_runtime.request.samplers import SAMPLERS

__all__ = ["heun"]
SHAPE = (4, 2, 6, 8)
CPU = torch.device("cpu")


def velocity(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
    """Of a model that is not linear in its latents, and knows the step."""
    return torch.tanh(latents.flip(-1)) - 0.3 * latents + 0.1 * float(step.sigma or 0.0)


@table("first", [0, 3])
@table("name", [*SAMPLERS, HEUN])
def test_the_rest_of_a_mask_follows_the_noised_picture(heun: str, name: str, first: int) -> None:
    """In every step; in the end it is the picture. Where the mask is, every value changes."""
    mask = torch.zeros(1, 1, *SHAPE[1:], dtype=torch.bool)
    mask[..., 4:] = True
    clean = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(7))
    sampler = build_sampler(name, 6, 3.0, {}).from_step(first)
    steps, noise, seen = sampler.steps(CPU), SampleNoise(SHAPE, (1, 2)), list[torch.Tensor]()
    assert {(step.index, step.num_steps) for step in steps} == {(index, 6 - first) for index in range(6 - first)}

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step == steps[len(seen)]
        seen.append(latents)
        return velocity(latents, step)

    drawn, made = noise.draw(), list[int]()
    # Without the settings of a request, which such a stage does not read.
    stage = PlainStage(ClipSize(8, 8, 1, 1), cast(Any, None), sampler, InitialLatents(clean, mask))
    place = stage.start(stage.begin(drawn, noise))
    found = stage.run(place, predict, lambda step, _: made.append(step.index), noise).latents.float()
    assert made == list(range(6 - first))
    rest = ~mask.expand_as(found)
    assert torch.equal(found[rest], clean.expand_as(found)[rest])
    assert (found - clean)[~rest].abs().min() > 0
    for step, latents in zip(steps, seen, strict=True):
        assert step.sigma is not None
        carried = ((latents - (1 - step.sigma) * clean) / step.sigma)[rest]
        assert abs(float(carried.std()) - 1) < 0.2
        if not SAMPLERS[name].adds_noise:
            assert (carried - drawn[rest]).abs().max() < 1e-4


def test_later_steps_are_those_of_the_whole_schedule() -> None:
    """Euler's steps from the third on take the latents there to the bits of all six."""
    sampler, kept = build_sampler("flow_match_euler", 6, 3.0, {}), list[torch.Tensor]()
    whole = sampler.sample(SampleNoise(SHAPE, (1,)).draw(), velocity, lambda _, latents: kept.append(latents))
    assert torch.equal(sampler.from_step(2).from_step(1).sample(kept[2], velocity), whole)
