"""Capture: the three things that are asked of CUDA, so that everything around them runs and is tested without it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

Run: TypeAlias = Callable[[], torch.Tensor]


class ForwardTime(Protocol):
    """The time of a forward pass that ran eagerly."""

    host_seconds: float

    def device_seconds(self) -> float:
        """Return the seconds from the pass's first kernel to the end of its last; waits for it."""


class Capture(Protocol):
    """Runs forward passes so that they are timed, prepared and captured."""

    def timed(self, run: Run) -> tuple[torch.Tensor, ForwardTime]:
        """Return the result of `run`, and its time."""

    def warm_up(self, run: Run) -> torch.Tensor:
        """Return the result of `run`, on the stream on which it is captured."""

    def capture(self, run: Run) -> Callable[[], torch.Tensor]:
        """Return a function that repeats what `run` did on the device, on the same addresses, and returns where the
        result is: the next replay overwrites it. `run` itself may compute nothing."""

    def pool_bytes(self) -> int:
        """Device memory that graphs hold for what is between their inputs and results."""


class CudaCapture:
    """Capture by torch.cuda.CUDAGraph. The graphs share one memory pool, as they never run at the same time: take the
    result of a replay before the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool_bytes: int | None = None

    def timed(self, run: Run) -> tuple[torch.Tensor, ForwardTime]:
        start, stop = _event(), _event()
        # A host that is ahead by as many launches as the queue takes (1,024) waits for the device at every further one.
        torch.cuda.synchronize(self._device)
        start.record()
        begin = time.perf_counter()
        result = run()
        host_seconds = time.perf_counter() - begin
        stop.record()
        return result, _EventTime(host_seconds, start, stop)

    def warm_up(self, run: Run) -> torch.Tensor:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = run()
        here.wait_stream(self._stream)
        # On this stream: memory of the other one may be taken again as soon as the result is dropped.
        return result.clone()

    def capture(self, run: Run) -> Callable[[], torch.Tensor]:
        if not self._graphs:
            # A pool ends with the last of its graphs.
            self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = None
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, such as the one that writes a file, are none of the capture's.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()
        self._graphs.add(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def pool_bytes(self) -> int:
        if not self._graphs:
            return 0
        # A snapshot lists every block of the process, and the pool changes with a capture alone.
        if self._pool_bytes is None:
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            mine = (segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(self._pool))
            self._pool_bytes = sum(int(segment["total_size"]) for segment in mine)
        return self._pool_bytes


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _EventTime:
    def __init__(self, host_seconds: float, start: torch.cuda.Event, stop: torch.cuda.Event) -> None:
        self.host_seconds = host_seconds
        self._start = start
        self._stop = stop

    def device_seconds(self) -> float:
        self._stop.synchronize()
        milliseconds: float = self._start.elapsed_time(self._stop)
        return milliseconds / 1000
