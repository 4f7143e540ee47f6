"""Euler samplers of flow matching (Lipman et al., arXiv:2210.02747), with the flow shift of Esser et al.,
arXiv:2403.03206, and of flow maps (AnyFlow, arXiv:2605.13724), to the bits of diffusers' schedulers.

x[i+1] = x[i] + (sigma[i+1] - sigma[i]) * v(x[i], sigma[i]),   sigma = s * t / (1 + (s - 1) * t) with flow shift s.

A flow map is told where the step leads, v(x[i], sigma[i], sigma[i+1]), and takes steps of any width. The solver is our
own: importing diffusers takes longer than a first command has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import torch

from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.denoising.schedule_loop import ResumableScheduler, ScheduleSampler
from diffusion_runtime.errors import RequestError
from diffusion_runtime.untrusted.known_settings import Allows, anything, is_false, is_positive, whole


def _is_terminal(value: Any) -> bool:
    return value is None or (is_positive(value) and value < 1)


@dataclass(frozen=True)
class FlowMatchEulerSampler(ScheduleSampler):
    """Euler steps as diffusers' FlowMatchEulerDiscreteScheduler computes them.

    Raises RequestError for a number of steps that the options do not allow.
    """

    settings: ClassVar[Mapping[str, Allows]] = {
        "num_train_timesteps": whole(2, 100_000),
        "shift_terminal": _is_terminal,
        # Of models whose noise levels are those of their training: TrainedLevels reads it.
        "training_shift": is_positive,
        "invert_sigmas": is_false,
        "stochastic_sampling": is_false,
        "use_karras_sigmas": is_false,
        "use_exponential_sigmas": is_false,
        "use_beta_sigmas": is_false,
    }

    def __post_init__(self) -> None:
        if self.num_steps == 1 and self.options.get("shift_terminal"):
            raise RequestError(
                "num_inference_steps: expected 2 or more, got 1: the last step of this model's schedule is at a noise "
                f"level of {self.options['shift_terminal']:g} (shift_terminal), the first one at 1"
            )

    def scheduler(self, device: torch.device) -> ResumableScheduler:
        return EulerSolver({**self.options, "shift": self.flow_shift}, self.num_steps, device, self.sigmas)


class EulerSolver:
    """A `ResumableScheduler` for one sample call. settings: by diffusers' names, and shift. even: noise levels
    of the steps before the shift, None for those of the model's training.

    timesteps: [num_steps], sigmas: [num_steps + 1], float32 on the device.
    """

    def __init__(
        self, settings: Mapping[str, Any], num_steps: int, device: torch.device, even: Sequence[float] | None = None
    ) -> None:
        num_train_timesteps, shift = settings.get("num_train_timesteps", 1000), settings.get("shift", 1.0)
        levels = (
            _training_levels(num_train_timesteps, shift, num_steps)
            if even is None
            else numpy.array(even).astype(numpy.float32)
        )
        levels = _shifted(levels, shift)
        terminal = settings.get("shift_terminal")
        if terminal:
            signal = 1 - levels
            levels = 1 - signal / (signal[-1] / (1 - terminal))
        self.config = SimpleNamespace(num_train_timesteps=num_train_timesteps)
        sigmas = torch.from_numpy(levels).to(dtype=torch.float32, device=device)
        self.timesteps = sigmas * num_train_timesteps
        self.sigmas = torch.cat([sigmas, torch.zeros(1, device=device)])
        self.history: Mapping[str, torch.Tensor] = {}
        self._index = 0

    def set_begin_index(self, begin_index: int) -> None:
        self._index = begin_index

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor,  # noqa: ARG002 - steps are counted
        sample: torch.Tensor,
        *,
        return_dict: bool = False,  # noqa: ARG002
    ) -> tuple[torch.Tensor, ...]:
        width = self.sigmas[self._index + 1] - self.sigmas[self._index]
        self._index += 1
        return (sample + width * model_output,)


def _training_levels(num_train_timesteps: int, shift: float, num_steps: int) -> numpy.ndarray[Any, Any]:
    """Evenly from the highest to the lowest noise level of the training, float64; diffusers shifts both ends, and all
    of them again."""
    trained = numpy.array([num_train_timesteps, 1], dtype=numpy.float32) / num_train_timesteps
    highest, lowest = (float(level) * num_train_timesteps for level in _shifted(trained, shift))
    levels: numpy.ndarray[Any, Any] = numpy.linspace(highest, lowest, num_steps) / num_train_timesteps
    return levels


def _shifted(levels: numpy.ndarray[Any, Any], shift: float) -> numpy.ndarray[Any, Any]:
    shifted: numpy.ndarray[Any, Any] = shift * levels / (1 + (shift - 1) * levels)
    return shifted


@dataclass(frozen=True)
class FlowMapEulerSampler(ScheduleSampler):
    """The steps of diffusers' FlowMapEulerDiscreteScheduler. The model is told where each step leads:
    StepInfo.next_timestep."""

    settings: ClassVar[Mapping[str, Allows]] = {
        "num_train_timesteps": whole(2, 100_000),
        # Of training alone: how losses at different noise levels are weighed.
        "weight_type": anything,
    }

    def scheduler(self, device: torch.device) -> ResumableScheduler:
        levels = LinearSigmas().sigmas(self.num_steps) if self.sigmas is None else self.sigmas
        return EulerSolver({**self.options, "shift": self.flow_shift}, self.num_steps, device, levels)
