"""What both trainings share: the clock that ends a call in time, the log, and the average of the weights."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor


@dataclass
class Clock:
    """Wall seconds of one training: when it must stop, and how far along its schedule it is."""

    seconds: float
    """Wall seconds of training: the length of the learning rate's schedule."""
    started: float = field(default_factory=time.monotonic)

    @property
    def trained(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def progress(self) -> float:
        """0 at the start of the schedule, 1 at its end."""
        return min(1.0, self.trained / self.seconds)

    def wait_while(self, is_paused: Callable[[], bool]) -> None:
        """Wait as long as this says so; the time does not count as training."""
        if not is_paused():
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        since = time.monotonic()
        while is_paused():
            time.sleep(0.2)
        self.started += time.monotonic() - since

    @property
    def is_over(self) -> bool:
        """Whether the training must stop."""
        return self.trained >= self.seconds


def cosine(progress: float, peak: float, end: float, warmup: float = 0.02) -> float:
    """Learning rate at a share of the training: linear warm-up, then cosine from `peak` to `end`."""
    if progress < warmup:
        return peak * (progress + 1e-4) / warmup
    share = (progress - warmup) / (1 - warmup)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


class Log:
    """A JSON-lines file of measurements; also printed, flushed at once so that a killed call keeps them.

    Without a path nothing is written or printed: the log of every process but the first.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")

    def write(self, **values: Any) -> None:
        """Write one line; floats are rounded to five significant digits."""
        if self._file is None:
            return
        rounded = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in values.items()}
        line = json.dumps(rounded)
        self._file.write(line + "\n")
        self._file.flush()
        print(line, flush=True)


class Average:
    """Exponential moving average of parameters, float32, with a horizon that grows to its final length."""

    def __init__(self, parameters: Iterable[Tensor], decay: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        self.steps = 0
        self.values = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the current parameters."""
        self.steps += 1
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.values, [parameter.detach() for parameter in self._parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the parameters and their average: call again to undo."""
        for parameter, value in zip(self._parameters, self.values, strict=True):
            held = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(held)
