"""The denoising loop around a solver with the interface of diffusers' schedulers."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler


class Scheduler(Protocol):
    """Solver as this loop uses it, the way diffusers' schedulers provide it.

    config: has `num_train_timesteps`.
    """

    timesteps: torch.Tensor
    sigmas: torch.Tensor
    config: Any

    def set_begin_index(self, begin_index: int) -> None: ...

    def step(
        self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, *, return_dict: bool
    ) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class ScheduleSampler(Sampler):
    """A sampler whose steps a Scheduler computes.

    num_steps: predictions; flow_shift: s of sigma = s * t / (1 + (s - 1) * t); options: further `settings`. sigmas: t
    of every step, None for the scheduler's own spacing.
    """

    num_steps: int
    flow_shift: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] | None = None

    @abstractmethod
    def scheduler(self, device: torch.device) -> Scheduler:
        """Return a fresh scheduler, with its timesteps set."""

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return steps_of(self.scheduler(device), self.num_steps)

    def sample(
        self,
        noise: torch.Tensor,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        return run_schedule(self.scheduler(noise.device), self.num_steps, noise, predict, on_step)

    def from_step(self, first: int) -> Sampler:
        return LaterSteps(self, first)


@dataclass(frozen=True)
class LaterSteps(Sampler):
    """The steps of a ScheduleSampler from one on. A multistep solver begins with the first order there."""

    whole: ScheduleSampler
    first: int

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return tuple(map(self._counted, steps_of(self.whole.scheduler(device), self.whole.num_steps, self._range)))

    def sample(
        self,
        noise: torch.Tensor,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        return run_schedule(
            self.whole.scheduler(noise.device),
            self.whole.num_steps,
            noise,
            lambda latents, step: predict(latents, self._counted(step)),
            None if on_step is None else lambda step, latents: on_step(self._counted(step), latents),
            self._range,
        )

    def from_step(self, first: int) -> Sampler:
        return LaterSteps(self.whole, self.first + first)

    @property
    def _range(self) -> range:
        return range(self.first, self.whole.num_steps)

    def _counted(self, step: StepInfo) -> StepInfo:
        return dataclasses.replace(step, index=step.index - self.first, num_steps=len(self._range))


def steps_of(scheduler: Scheduler, num_steps: int, steps: range | None = None) -> tuple[StepInfo, ...]:
    """Steps of a scheduler with its timesteps set, as `run_schedule` runs them; all where `steps` is None."""
    # Read once: a timestep read from an accelerator inside the loop would synchronise with every step's kernels.
    timesteps, sigmas = scheduler.timesteps.tolist(), scheduler.sigmas.tolist()
    return tuple(
        StepInfo(
            index,
            num_steps,
            timestep=float(timesteps[index]),
            sigma=float(sigmas[index]),
            next_timestep=float(timesteps[index + 1]) if index + 1 < len(timesteps) else 0.0,
        )
        for index in (range(len(timesteps)) if steps is None else steps)
    )


def run_schedule(
    scheduler: Scheduler,
    num_steps: int,
    noise: torch.Tensor,
    predict: Predict,
    on_step: OnStep | None,
    steps: range | None = None,
) -> torch.Tensor:
    """Latents like `noise`, float32, after `num_steps` steps from it. scheduler: with its timesteps set. steps: those
    to run, from latents at the noise level of the first of them; None for all.

    Velocities are converted to float32 before the scheduler gets them: it would otherwise round the latents to the
    model's dtype at every step.
    """
    # Without it the scheduler searches for its step, which synchronises with the device.
    scheduler.set_begin_index(0 if steps is None else steps.start)
    latents = noise.float()
    for step in steps_of(scheduler, num_steps, steps):
        velocity = predict(latents, step).float()
        latents = scheduler.step(velocity, scheduler.timesteps[step.index], latents, return_dict=False)[0]
        if on_step is not None:
            on_step(step, latents)
    return latents
