"""Every sampler, left between two steps and gone on with, has the bits of a whole run."""

from __future__ import annotations

import pytest
import torch
from heun_sampler import NAME as HEUN
from heun_sampler import heun  # noqa: F401 - a fixture
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import SamplerState
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.request.samplers import SAMPLERS

pytestmark = pytest.mark.usefixtures("heun")
SHAPE = (4, 2, 3, 3)


def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
    assert step.timestep is not None
    return torch.sin(3 * latents) + 0.5 * latents * (step.timestep / 1000)


@table("name", [*SAMPLERS, HEUN])
@table("stop", [0, 1, 2, 4, 5, 6])
def test_a_run_that_was_left_equals_a_whole_one(name: str, stop: int) -> None:
    sampler, whole, first, rest = build_sampler(name, 6, 3.0, {}), *(SampleNoise(SHAPE, [1, 2]) for _ in range(3))
    expected = sampler.sample(whole.draw(), predict, draw_noise=whole.draw)
    steps: list[int] = []
    left = sampler.run(sampler.start(first.draw()), predict, lambda step, _: steps.append(step.index), first.draw, stop)
    assert left.index == stop
    # As a file holds it: copies, and noise that is drawn again.
    history = {key: each.clone() for key, each in left.history.items()}
    assert all(each.shape == left.latents.shape for each in history.values())
    copied = SamplerState(left.index, left.latents.clone(), history)
    rest.draw_again(first.drawn)
    ended = sampler.run(copied, predict, lambda step, _: steps.append(step.index), rest.draw)
    assert torch.equal(ended.latents.float(), expected)
    assert steps == list(range(6))
    assert ended.index == 6


@table(
    ("name", "kept"),
    [
        ("flow_match_euler", set()),
        ("euler_ancestral", set()),
        ("unipc", {"prediction_0", "prediction_1", "before"}),
        ("dpmpp_2m", {"prediction"}),
        ("dpmpp_2m_sigma", {"data"}),
        ("unipc_sigma", {"data", "data_1", "data_2", "start"}),
        ("er_sde", {"data", "slope"}),
    ],
)
def test_what_multistep_samplers_keep_matters(name: str, kept: set[str]) -> None:
    sampler, noise = build_sampler(name, 6, 3.0, {}), SampleNoise(SHAPE, [1])
    left = sampler.run(sampler.start(noise.draw()), predict, None, noise.draw, 3)
    assert set(left.history) == kept
    again = SampleNoise(SHAPE, [1])
    again.draw_again(noise.drawn)
    ends = [sampler.run(each, predict, None, noise.draw).latents for each in (left,)]
    ends.append(sampler.run(SamplerState(3, left.latents), predict, None, again.draw).latents)
    assert torch.equal(*ends) == (not kept)
