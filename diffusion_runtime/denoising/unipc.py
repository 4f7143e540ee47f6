"""UniPC sampler, a multistep predictor-corrector (Zhao et al. 2023, arXiv:2302.04867), for flow matching with data
prediction, to the bits of diffusers' scheduler.

The solver is our own: importing diffusers takes longer than a first command has.
"""

from __future__ import annotations

import math
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
    either,
    is_nothing,
    is_true,
    several,
    whole,
)

# With a noise level of 1 the signal is 0 and its logarithm infinite: the first step starts a little below.
_FIRST_LEVEL_BELOW_ONE = 1e-6
_MAX_ORDER = 3

# Setting of diffusers' class -> the values with which this solver computes what that class computes.
_SETTINGS: Mapping[str, Allows] = {
    **MULTISTEP_SETTINGS,
    "solver_order": whole(1, _MAX_ORDER),
    # With bh1 the class divides infinity by infinity at a last noise level of 0.
    "solver_type": either("bh2"),
    # A second order at the last step, to a noise level of 0, divides infinity by infinity.
    "lower_order_final": is_true,
    "disable_corrector": several(whole(0, 100_000)),
    # What would change the schedule or the prediction.
    "shift_terminal": is_nothing,
    # What nothing reads with those values.
    "sigma_min": is_nothing,
    "sigma_max": is_nothing,
}


@dataclass(frozen=True)
class UniPCSampler(ScheduleSampler):
    """UniPC as diffusers' UniPCMultistepScheduler computes it.

    `sigmas` are not read: the solver spaces its own.
    """

    settings: ClassVar[Mapping[str, Allows]] = _SETTINGS

    def scheduler(self, device: torch.device) -> ResumableScheduler:
        return UniPCSolver({**self.options, "flow_shift": self.flow_shift}, self.num_steps, device)


class UniPCSolver:
    """A `ResumableScheduler` for one sample call. settings: by diffusers' names, and flow_shift.

    timesteps: [num_steps], whole numbers on the device; sigmas: [num_steps + 1] on the CPU.
    """

    def __init__(self, settings: Mapping[str, Any], num_steps: int, device: torch.device) -> None:
        num_train_timesteps = settings.get("num_train_timesteps", 1000)
        levels = _noise_levels(num_train_timesteps, settings.get("flow_shift", 1.0), num_steps)
        self.config = SimpleNamespace(num_train_timesteps=num_train_timesteps)
        self.timesteps = torch.from_numpy(levels * num_train_timesteps).to(device=device, dtype=torch.int64)
        self.sigmas = torch.from_numpy(numpy.append(levels, 0.0).astype(numpy.float32))
        self._max_order: int = settings.get("solver_order", 2)
        self._ends_low = settings.get("lower_order_final", True)
        self._uncorrected = frozenset(settings.get("disable_corrector", ()))
        self._index = 0
        # Clean latents as predicted at the last steps, the newest at the end.
        self._predictions: list[torch.Tensor] = []
        self._before: torch.Tensor | None = None

    @property
    def history(self) -> Mapping[str, torch.Tensor]:
        """The predictions, the newest with the lowest number, and the sample before the last step."""
        kept = {f"prediction_{back}": each for back, each in enumerate(reversed(self._predictions))}
        return kept if self._before is None else {**kept, "before": self._before}

    @history.setter
    def history(self, history: Mapping[str, torch.Tensor]) -> None:
        names = [name for back in range(self._max_order) if (name := f"prediction_{back}") in history]
        self._predictions = [history[name] for name in reversed(names)]
        self._before = history.get("before")

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
        """Correct the sample by the model's prediction, then take it to the next noise level."""
        prediction = sample - self.sigmas[self._index] * model_output
        if self._before is not None and self._index - 1 not in self._uncorrected:
            sample = self._corrected(prediction)
        self._predictions = [*self._predictions, prediction][-self._max_order :]
        self._before = sample
        following = self._predicted(sample)
        self._index += 1
        return (following,)

    def _order_at(self, index: int) -> int:
        """Return the order of a step whose prediction is the newest."""
        remaining = len(self.timesteps) - index
        order = min(self._max_order, remaining) if self._ends_low else self._max_order
        return min(order, len(self._predictions))

    def _predicted(self, sample: torch.Tensor) -> torch.Tensor:
        """UniP: from the noise level of this step to the next one."""
        interval = self._interval(self._index, sample.device)
        linear = interval.linear(sample, self._predictions[-1])
        if not interval.differences:
            return linear
        differences = torch.stack(interval.differences, dim=1)
        order = self._order_at(self._index)
        if order == 2:
            weights = torch.ones(1, dtype=sample.dtype, device=sample.device) * 0.5
        else:
            matrix, right = interval.system(order)
            weights = torch.linalg.solve(matrix[:-1, :-1], right[:-1]).to(sample.dtype)
        return linear - interval.signal * interval.scale * torch.einsum("k,bkc...->bc...", weights, differences)

    def _corrected(self, prediction: torch.Tensor) -> torch.Tensor:
        """UniC: the last step again, knowing where it led. prediction: the model's, where it led."""
        assert self._before is not None
        before, newest = self._before, self._predictions[-1]
        interval, order = self._interval(self._index - 1, before.device), self._order_at(self._index - 1)
        if order == 1:
            weights = torch.ones(1, dtype=before.dtype, device=before.device) * 0.5
        else:
            matrix, right = interval.system(order)
            weights = torch.linalg.solve(matrix, right).to(before.dtype)
        correction: torch.Tensor | float = 0
        if interval.differences:
            differences = torch.stack(interval.differences, dim=1)
            correction = torch.einsum("k,bkc...->bc...", weights[:-1], differences)
        total = correction + weights[-1] * (prediction - newest)
        return interval.linear(before, newest) - interval.signal * interval.scale * total

    def _interval(self, start: int, device: torch.device) -> _Interval:
        """Return the interval from noise level `start` to the next one, with the earlier predictions that the order
        requires."""
        levels = self.sigmas.to(device)
        ratio = _log_ratio(levels[start])
        width = _log_ratio(levels[start + 1]) - ratio
        places, differences = [], []
        for back in range(1, self._order_at(start)):
            place = (_log_ratio(levels[start - back]) - ratio) / width
            places.append(place)
            differences.append((self._predictions[-(back + 1)] - self._predictions[-1]) / place)
        return _Interval(levels[start], levels[start + 1], -width, places, differences)


@dataclass(frozen=True)
class _Interval:
    """From one noise level to the next, `width` apart in the negative logarithm of the signal-to-noise ratio.

    places: of earlier predictions, in widths from the start. differences: theirs from the newest, divided by places.
    """

    start: torch.Tensor
    end: torch.Tensor
    width: torch.Tensor
    places: list[torch.Tensor]
    differences: list[torch.Tensor]

    @property
    def signal(self) -> torch.Tensor:
        """The share of the signal at the end."""
        return 1 - self.end

    @property
    def scale(self) -> torch.Tensor:
        """B(h) of the paper, in its second form."""
        return torch.expm1(self.width)

    def linear(self, sample: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
        """Return the solution for a prediction that does not change."""
        return self.end / self.start * sample - self.signal * self.scale * prediction

    def system(self, order: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the equations of the weights that make the step exact to `order`: [order, order] and [order]."""
        places = torch.stack([*self.places, torch.ones((), device=self.width.device)])
        phi, factorial = self.scale / self.width - 1, 1
        rows, right = [], []
        for power in range(order):
            rows.append(torch.pow(places, power))
            right.append(phi * factorial / self.scale)
            factorial *= power + 2
            phi = phi / self.width - 1 / factorial
        return torch.stack(rows), torch.stack(right)


def _log_ratio(level: torch.Tensor) -> torch.Tensor:
    """Half the logarithm of the signal-to-noise ratio."""
    return torch.log(1 - level) - torch.log(level)


def _noise_levels(num_train_timesteps: int, flow_shift: float, num_steps: int) -> numpy.ndarray[Any, Any]:
    """[num_steps], float64: from 1 on evenly, shifted."""
    even = numpy.linspace(1, 1 / num_train_timesteps, num_steps + 1)[:-1]
    levels: numpy.ndarray[Any, Any] = flow_shift * even / (1 + (flow_shift - 1) * even)
    if math.fabs(levels[0] - 1) < _FIRST_LEVEL_BELOW_ONE:
        levels[0] -= _FIRST_LEVEL_BELOW_ONE
    return levels
