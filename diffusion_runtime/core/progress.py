"""Progress of a generation, and the duration of each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from diffusion_runtime.errors import Cancelled

# `clips`: whole clips that are made one after the other, as a tuning counts them.
Stage: TypeAlias = Literal["text", "denoise", "decode", "clips"]


@dataclass(frozen=True)
class Progress:
    """`step` of `num_steps` of a stage are done, `seconds` after the stage began; step 0 means that it begins.

    request_index: which request of the batch, None for a stage in which all of them advance together. num_kept: steps
    that were kept from before and took no time.
    """

    stage: Stage
    step: int
    num_steps: int
    seconds: float
    request_index: int | None = None
    num_kept: int = 0


OnProgress: TypeAlias = Callable[[Progress], None]


class Cancellations:
    """Which requests of a batch were cancelled: those that `on_progress` named in a Cancelled."""

    def __init__(self, num_requests: int, on_progress: OnProgress | None) -> None:
        self._waiting = dict.fromkeys(range(num_requests))
        self._on_progress = on_progress

    def is_wanted(self, request_index: int) -> bool:
        return request_index in self._waiting

    def watch(self, progress: Progress) -> None:
        """Watch progress as an on_progress. Raises Cancelled once no request is left."""
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Cancelled as cancelled:
            if cancelled.request_indices is None:
                raise
            for index in cancelled.request_indices:
                self._waiting.pop(index, None)
            if not self._waiting:
                raise


class StageClock:
    """Measures the time of stages, and reports progress to a callback."""

    def __init__(self, device: torch.device, on_progress: OnProgress | None) -> None:
        self._device = device
        self._on_progress = on_progress
        self._seconds: dict[tuple[Stage, int | None], float] = {}

    @contextmanager
    def stage(
        self, stage: Stage, num_steps: int, request_index: int | None = None, *, began: float | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the number of steps that are done. began: time.perf_counter() at the first of
        the steps, where earlier ones ran before this stage; progress counts its seconds from there."""
        started = time.perf_counter()
        since = started if began is None else began

        def done(step: int) -> None:
            if self._on_progress is not None:
                if step:
                    self._wait()
                seconds = time.perf_counter() - since
                self._on_progress(Progress(stage, step, num_steps, seconds, request_index))

        done(0)
        yield done
        self._wait()
        seconds = self._seconds.get((stage, request_index), 0.0)
        # A stage may come again, in a video that is made in segments.
        self._seconds[stage, request_index] = seconds + time.perf_counter() - started

    def timings(self, request_index: int) -> dict[str, float]:
        """Seconds by stage: the batch's where all requests advance together, else the request's own."""
        return {stage: seconds for (stage, index), seconds in self._seconds.items() if index in (None, request_index)}

    def _wait(self) -> None:
        # An accelerator runs asynchronously. Without a progress callback it is synchronised with once per stage only.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
