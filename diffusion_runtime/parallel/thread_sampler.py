"""Samples a thread's stack and CPU time, for hang detection: the innermost Python line, and how long it has been
idle."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from diffusion_runtime.parallel.signs_of_life import read_state

# Code that waits for other processes or for the device, and is not at fault for taking long. On an accelerator work is
# queued, so a process that waits for another one often does so where it waits for its own device.
_WAITING = ("torch.distributed", "diffusion_runtime.parallel", "torch.cuda", "torch.accelerator")

# The share of a CPU that a waiting thread stays below.
_BUSY_SHARE = 0.02
# The sampler itself reads and writes some kilobytes per sample.
_FEW_BYTES_PER_SECOND = 100_000
# After a longer gap between samples the timers restart: the machine may have been suspended.
_LONGEST_GAP_SECONDS = 3.0


@dataclass(frozen=True)
class ThreadSample:
    """place: `file.py:12 in name`; waits: for other processes, and waiting_seconds: for how long. idle_seconds: how
    long the thread has been at one place without CPU time; process_idle_seconds: how long, besides, no other thread of
    the process has computed, read or written anything."""

    place: str
    idle_seconds: float
    process_idle_seconds: float
    waiting_seconds: float
    waits: bool


class ThreadSampler:
    """Samples one thread repeatedly. thread_id: `threading.Thread.ident`."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._seen: tuple[tuple[int, int], ...] = ()
        now = time.monotonic()
        self._idle_since = self._process_idle_since = self._waiting_since = self._looked = now
        self._computed = self._seconds_computed()
        self._process_computed, self._num_bytes = _process_work()

    def look(self) -> ThreadSample:
        """Look at the thread: its whole stack shows whether it has moved, its CPU clock whether it computes."""
        now, computed = time.monotonic(), self._seconds_computed()
        process_computed, num_bytes = _process_work()
        seconds = now - self._looked
        innermost = sys._current_frames().get(self._thread_id)
        frames: list[FrameType] = []
        frame = innermost
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        seen = tuple((id(each), each.f_lasti) for each in frames)
        slept = seconds > _LONGEST_GAP_SECONDS
        if seen != self._seen or slept or computed - self._computed > _BUSY_SHARE * seconds:
            self._seen, self._idle_since = seen, now
        is_at_work = num_bytes - self._num_bytes > _FEW_BYTES_PER_SECOND * seconds
        if self._idle_since == now or is_at_work or process_computed - self._process_computed > _BUSY_SHARE * seconds:
            self._process_idle_since = now
        self._looked, self._computed = now, computed
        self._process_computed, self._num_bytes = process_computed, num_bytes
        module = "" if innermost is None else innermost.f_globals.get("__name__", "")
        waits = isinstance(module, str) and f"{module}.".startswith(tuple(f"{name}." for name in _WAITING))
        if not waits or slept:
            self._waiting_since = now
        if innermost is None:
            return ThreadSample("nowhere", 0.0, 0.0, 0.0, False)
        file = Path(innermost.f_code.co_filename).name
        place = f"{file}:{innermost.f_lineno} in {innermost.f_code.co_name}"
        return ThreadSample(
            place, now - self._idle_since, now - self._process_idle_since, now - self._waiting_since, waits
        )

    def forget_waiting(self) -> None:
        """Treat a wait that is seen at the next look as begun now."""
        self._waiting_since = time.monotonic()

    def _seconds_computed(self) -> float:
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread_id))
        except OSError:
            # The thread has ended.
            return 0.0


def _process_work() -> tuple[float, int]:
    """CPU seconds of all threads but this one, which samples; and bytes read and written."""
    state = read_state("self")
    return time.process_time() - time.thread_time(), 0 if state is None else state.num_bytes
