"""Loop of samplers that are given the noise level of every step, between estimates of the data in float64."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import LinearSigmas, shifted
from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler, SamplerState

_NUM_TRAIN_TIMESTEPS = 1000

# Latents at a noise level -> the clean ones that the model sees in them, in the loop's precision.
Estimate = Callable[[torch.Tensor, float], torch.Tensor]
Draw = Callable[[], torch.Tensor]
# What a sampler keeps of earlier steps, by name.
History = dict[str, torch.Tensor]


def precision_on(device: torch.device) -> torch.dtype:
    """Return the dtype of the latents between predictions. Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class LevelSampler(Sampler):
    """A sampler at given noise levels.

    num_steps: steps; flow_shift: s of sigma = s * t / (1 + (s - 1) * t). options: of them num_train_timesteps counts,
    which makes timesteps of noise levels. sigmas: t of every step, None for linear ones.
    """

    num_steps: int
    flow_shift: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] | None = None

    @property
    def levels(self) -> tuple[float, ...]:
        """sigma of every step."""
        unshifted = LinearSigmas().sigmas(self.num_steps) if self.sigmas is None else self.sigmas
        return tuple(shifted(level, self.flow_shift) for level in unshifted)

    @property
    def num_train_timesteps(self) -> int:
        """Timesteps of noise level 1."""
        return int(self.options.get("num_train_timesteps", _NUM_TRAIN_TIMESTEPS))

    def between(self, level: float, following: float) -> float | None:
        """Return the noise level of a second prediction within a step; None without one."""
        del level, following
        return None

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:  # noqa: ARG002
        found = []
        for index, (level, following) in enumerate(zip(self.levels, (*self.levels[1:], 0.0), strict=True)):
            second = self.between(level, following)
            ends = [(level, following)] if second is None else [(level, second), (second, following)]
            found += [self._step(index, *end) for end in ends]
        return tuple(found)

    def _step(self, index: int, level: float, following: float) -> StepInfo:
        scale = self.num_train_timesteps
        return StepInfo(index, self.num_steps, timestep=scale * level, sigma=level, next_timestep=scale * following)

    def from_step(self, first: int) -> LevelSampler:
        levels = self.levels[first:]
        return dataclasses.replace(self, num_steps=len(levels), flow_shift=1.0, sigmas=levels)

    def begin(self, noise: torch.Tensor) -> torch.Tensor:
        """Return the latents of the first step."""
        return noise

    @abstractmethod
    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        """Return the latents at the end of a step. levels: those up to it; a whole schedule ends at 0. history: what
        the steps before have left, which this one changes."""

    def start(self, noise: torch.Tensor) -> SamplerState:
        return SamplerState(0, self.begin(noise.to(precision_on(noise.device))))

    def run(
        self,
        state: SamplerState,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,
        end: int | None = None,
    ) -> SamplerState:
        latents, history = state.latents, dict(state.history)
        precision, levels, steps = latents.dtype, (*self.levels, 0.0), self.steps(latents.device)
        waiting = iter([step for step in steps if step.index >= state.index])

        def estimate(at: torch.Tensor, level: float) -> torch.Tensor:
            velocity = predict(at.float(), next(waiting)).to(precision)
            return at - level * velocity

        def draw() -> torch.Tensor:
            assert draw_noise is not None, "this sampler adds noise: give it draw_noise"
            return draw_noise().to(latents.device, precision)

        firsts = {step.index: step for step in reversed(steps)}
        end = self.num_steps if end is None else end
        for index in range(state.index, end):
            latents = self.advance(latents, levels[: index + 2], history, estimate, draw)
            if on_step is not None:
                on_step(firsts[index], latents.float())
        return SamplerState(max(state.index, end), latents, history)
