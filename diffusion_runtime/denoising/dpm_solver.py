"""DPM-Solver++ 2M sampler, a multistep solver of second order (Lu et al. 2022, arXiv:2211.01095), for flow matching
with data prediction, to the bits of diffusers' scheduler.

The solver is our own: importing diffusers takes longer than a first command has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import torch

from diffusion_runtime.denoising.multistep_settings import MULTISTEP_SETTINGS
from diffusion_runtime.denoising.schedule_loop import ResumableScheduler, ScheduleSampler
from diffusion_runtime.untrusted.known_settings import (
    Allows,
    anything,
    either,
    is_false,
    is_nothing,
    whole,
)

# Setting of diffusers' class -> the values with which this solver computes what that class computes.
_SETTINGS: Mapping[str, Allows] = {
    **MULTISTEP_SETTINGS,
    "algorithm_type": either("dpmsolver++"),
    "solver_order": whole(1, 2),
    "solver_type": either("midpoint"),
    # What would change the schedule or the prediction.
    "use_lu_lambdas": is_false,
    "variance_type": is_nothing,
    # What nothing reads with those values: the last step, to a noise level of 0, is of first order in any case.
    "lower_order_final": either(True, False),
    "euler_at_final": either(True, False),
    # Of the schedule without flow sigmas; the class writes minus infinity.
    "lambda_min_clipped": anything,
    # UniPC's, which the class does not know and a folder may keep.
    "disable_corrector": either([]),
}


@dataclass(frozen=True)
class DpmSolverSampler(ScheduleSampler):
    """DPM-Solver++ 2M as diffusers' DPMSolverMultistepScheduler computes it.

    `sigmas` are not read: the solver spaces its own.
    """

    settings: ClassVar[Mapping[str, Allows]] = _SETTINGS

    def scheduler(self, device: torch.device) -> ResumableScheduler:
        return DpmSolver({**self.options, "flow_shift": self.flow_shift}, self.num_steps, device)


class DpmSolver:
    """A `ResumableScheduler` for one sample call. settings: by diffusers' names, and flow_shift.

    timesteps: [num_steps], whole numbers on the device; sigmas: [num_steps + 1] on the CPU.
    """

    def __init__(self, settings: Mapping[str, Any], num_steps: int, device: torch.device) -> None:
        num_train_timesteps = settings.get("num_train_timesteps", 1000)
        levels = _noise_levels(num_train_timesteps, settings.get("flow_shift", 1.0), num_steps)
        self.config = SimpleNamespace(num_train_timesteps=num_train_timesteps)
        self.timesteps = torch.from_numpy(levels * num_train_timesteps).to(device=device, dtype=torch.int64)
        self.sigmas = torch.from_numpy(numpy.append(levels, 0.0).astype(numpy.float32))
        self._order: int = settings.get("solver_order", 2)
        self._index = 0
        # The clean latents as predicted at the last step.
        self.history: Mapping[str, torch.Tensor] = {}

    def set_begin_index(self, begin_index: int) -> None:
        self._index = begin_index

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor,  # noqa: ARG002 - steps are counted, as timesteps may come twice
        sample: torch.Tensor,
        *,
        return_dict: bool = False,  # noqa: ARG002
    ) -> tuple[torch.Tensor, ...]:
        """Take the sample to the next noise level, by the line through this prediction and the one before it."""
        start, end = self.sigmas[self._index], self.sigmas[self._index + 1]
        prediction = sample - start * model_output
        is_last = self._index == len(self.timesteps) - 1
        width = _log_ratio(end) - _log_ratio(start)
        signal = (1 - end) * (torch.exp(-width) - 1.0)
        following = (end / start) * sample - signal * prediction
        before = self.history.get("prediction")
        if self._order == 2 and before is not None and not is_last:
            ratio = (_log_ratio(start) - _log_ratio(self.sigmas[self._index - 1])) / width
            following = following - 0.5 * signal * ((1.0 / ratio) * (prediction - before))
        self.history = {"prediction": prediction}
        self._index += 1
        return (following,)


def _log_ratio(level: torch.Tensor) -> torch.Tensor:
    """Half the logarithm of the signal-to-noise ratio."""
    return torch.log(1 - level) - torch.log(level)


def _noise_levels(num_train_timesteps: int, flow_shift: float, num_steps: int) -> numpy.ndarray[Any, Any]:
    """[num_steps], float64: from just below 1 on evenly, shifted."""
    even = 1.0 - numpy.linspace(1, 1 / num_train_timesteps, num_steps + 1)
    levels: numpy.ndarray[Any, Any] = numpy.flip(flow_shift * even / (1 + (flow_shift - 1) * even))[:-1].copy()
    return levels
