"""Heun's sampler (Karras et al., arXiv:2206.00364, algorithm 1): two predictions per step, one at the last.

Registered by the tests that use it: the samplers of this package call the model once per step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler, SamplerState
from diffusion_runtime.request import samplers
from diffusion_runtime.request.samplers import RegisteredSampler

NAME = "heun"


@dataclass(frozen=True)
class HeunSampler(Sampler):
    num_steps: int
    flow_shift: float
    options: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] | None = None

    def levels(self) -> list[float]:
        times = [1 - index / self.num_steps for index in range(self.num_steps)]
        shifted = [self.flow_shift * time / (1 + (self.flow_shift - 1) * time) for time in times]
        return [*(shifted if self.sigmas is None else self.sigmas), 0.0]

    def steps_at(self) -> Iterator[tuple[float, float, StepInfo, StepInfo | None]]:
        """(level, next level, the first prediction, the second one or None) of each step."""
        scale = self.options.get("num_train_timesteps", 1000)
        for index, (level, following) in enumerate(itertools.pairwise(self.levels())):

            def at(sigma: float, index: int = index, following: float = following) -> StepInfo:
                return StepInfo(index, self.num_steps, scale * sigma, sigma, next_timestep=scale * following)

            yield level, following, at(level), at(following) if following else None

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return tuple(step for *_, first, second in self.steps_at() for step in (first, second) if step is not None)

    def from_step(self, first: int) -> HeunSampler:
        levels = tuple(self.levels()[first:-1])
        return dataclasses.replace(self, num_steps=len(levels), flow_shift=1.0, sigmas=levels)

    def start(self, noise: torch.Tensor) -> SamplerState:
        return SamplerState(0, noise.float())

    def run(
        self,
        state: SamplerState,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,
        end: int | None = None,
    ) -> SamplerState:
        latents, end = state.latents, self.num_steps if end is None else end
        for level, following, first, second in itertools.islice(self.steps_at(), state.index, end):
            slope = predict(latents, first).float()
            ahead = latents + (following - level) * slope
            if second is not None:
                slope = (slope + predict(ahead, second).float()) / 2
                ahead = latents + (following - level) * slope
            latents = ahead
            if on_step is not None:
                on_step(first, latents)
        return SamplerState(max(state.index, end), latents)


@pytest.fixture
def heun() -> Iterator[str]:
    """The name of the sampler, while it is registered."""
    declared = RegisteredSampler(f"{__name__}:HeunSampler", takes_levels=True, num_predictions_per_step=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(samplers._REGISTERED, NAME, declared)
        yield NAME
