"""The denoising loop around a solver with the interface of diffusers' schedulers."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler, SamplerState


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


class ResumableScheduler(Scheduler, Protocol):
    """A Scheduler whose steps may be left and gone on with.

    history: what it keeps of earlier steps by name, of the latents' shape, set before `set_begin_index` to go on.
    """

    history: Mapping[str, torch.Tensor]


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
    def scheduler(self, device: torch.device) -> ResumableScheduler:
        """Return a fresh scheduler, with its timesteps set."""

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return steps_of(self.scheduler(device), self.num_steps)

    def from_step(self, first: int) -> Sampler:
        return LaterSteps(self, first)

    def start(self, noise: torch.Tensor) -> SamplerState:
        return SamplerState(0, noise.float())

    def run(
        self,
        state: SamplerState,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,  # noqa: ARG002
        end: int | None = None,
    ) -> SamplerState:
        end = self.num_steps if end is None else end
        return go_on(self.scheduler(state.latents.device), self.num_steps, state, predict, on_step, end)


def go_on(
    scheduler: ResumableScheduler,
    num_steps: int,
    state: SamplerState,
    predict: Predict,
    on_step: OnStep | None,
    end: int,
) -> SamplerState:
    """Run the steps from a place on that are before step `end`, and return the place behind. scheduler: fresh, with its
    timesteps set."""
    if end <= state.index:
        return state
    scheduler.history = state.history
    latents = run_schedule(scheduler, num_steps, state.latents, predict, on_step, range(state.index, end))
    return SamplerState(end, latents, scheduler.history)


@dataclass(frozen=True)
class LaterSteps(Sampler):
    """The steps of a ScheduleSampler from one on. A multistep solver begins with the first order there."""

    whole: ScheduleSampler
    first: int

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return tuple(map(self._counted, steps_of(self.whole.scheduler(device), self.whole.num_steps, self._range)))

    def start(self, noise: torch.Tensor) -> SamplerState:
        return self.whole.start(noise)

    def run(
        self,
        state: SamplerState,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,
        end: int | None = None,
    ) -> SamplerState:
        place = self.whole.run(
            dataclasses.replace(state, index=self.first + state.index),
            lambda latents, step: predict(latents, self._counted(step)),
            None if on_step is None else lambda step, latents: on_step(self._counted(step), latents),
            draw_noise,
            None if end is None else self.first + end,
        )
        return dataclasses.replace(place, index=place.index - self.first)

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
