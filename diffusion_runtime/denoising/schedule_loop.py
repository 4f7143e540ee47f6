"""The loop around a diffusers scheduler, and how one is built from a folder's settings."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from diffusion_runtime.attention.info import StepInfo
from diffusion_runtime.denoising.interface import OnStep, Predict
from diffusion_runtime.errors import ModelLoadError

logger = logging.getLogger("diffusion_runtime")


class Scheduler(Protocol):
    """What this loop needs of a diffusers scheduler."""

    timesteps: torch.Tensor
    sigmas: torch.Tensor

    def set_begin_index(self, begin_index: int) -> None: ...

    def step(
        self, model_output: torch.Tensor, timestep: torch.Tensor, sample: torch.Tensor, *, return_dict: bool
    ) -> tuple[torch.Tensor, ...]: ...


def build_scheduler(scheduler_class: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """A scheduler of a diffusers class; settings that class does not have are left out with a warning.

    Raises ModelLoadError when the class refuses a value.
    """
    known = set(inspect.signature(scheduler_class).parameters)
    name = getattr(scheduler_class, "__name__", "scheduler")
    unknown = sorted(set(options) - known)
    if unknown:
        logger.warning("%s: settings of the model folder that this version does not know: %s", name, ", ".join(unknown))
    try:
        return scheduler_class(**{key: value for key, value in options.items() if key in known})
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        raise ModelLoadError(f"scheduler/scheduler_config.json: {name} refuses its settings: {error}") from error


def run_schedule(
    scheduler: Scheduler, num_steps: int, noise: torch.Tensor, predict: Predict, on_step: OnStep | None
) -> torch.Tensor:
    """Latents like `noise`, float32, after `num_steps` steps from it. scheduler: with its timesteps set.

    Velocities are taken to float32 before the scheduler sees them: it would otherwise round the latents to the model's
    dtype at every step.
    """
    scheduler.set_begin_index(0)  # Without it the scheduler searches for its step and waits for the device.
    # Read once: a timestep taken from an accelerator inside the loop would wait for every step's kernels.
    timesteps, sigmas = scheduler.timesteps.tolist(), scheduler.sigmas.tolist()
    latents = noise.float()
    for index, timestep in enumerate(scheduler.timesteps):
        step = StepInfo(index, num_steps, timestep=float(timesteps[index]), sigma=float(sigmas[index]))
        velocity = predict(latents, step).float()
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        if on_step is not None:
            on_step(step, latents)
    return latents
