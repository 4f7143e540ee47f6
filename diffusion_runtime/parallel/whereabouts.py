"""Where a thread is: the innermost Python line, for how long it has been there, and whether it works."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# Code that waits for other processes or for the device, and is not to blame for taking long. On an accelerator work is
# queued, so a process that waits for another one often does so where it waits for its own device.
_WAITING = ("torch.distributed", "diffusion_runtime.parallel", "torch.cuda", "torch.accelerator")

# The share of a processor that a thread which only waits stays below.
_BUSY_SHARE = 0.02
# After a longer time without a look nothing is known of it: the machine may have slept.
_LONGEST_GAP_SECONDS = 3.0


@dataclass(frozen=True)
class Whereabouts:
    """place: `file.py:12 in name`; waits: for other processes. still_seconds: for how long it was seen nowhere else,
    which a loop may be too; idle_seconds: for how long it has computed nothing there."""

    place: str
    still_seconds: float
    idle_seconds: float
    waits: bool


class ThreadObserver:
    """Looks at one thread again and again. thread_id: `threading.Thread.ident`."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._seen: tuple[tuple[int, int], ...] = ()
        self._still_since = self._idle_since = self._looked = time.monotonic()
        self._computed = self._seconds_computed()

    def look(self) -> Whereabouts:
        """The whole stack tells whether it was seen elsewhere, the processor's clock whether it computes."""
        now, computed = time.monotonic(), self._seconds_computed()
        innermost = sys._current_frames().get(self._thread_id)
        frames: list[FrameType] = []
        frame = innermost
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        seen = tuple((id(each), each.f_lasti) for each in frames)
        if seen != self._seen or now - self._looked > _LONGEST_GAP_SECONDS:
            self._seen, self._still_since, self._idle_since = seen, now, now
        if computed - self._computed > _BUSY_SHARE * (now - self._looked):
            self._idle_since = now
        self._looked, self._computed = now, computed
        if innermost is None:
            return Whereabouts("nowhere", 0.0, 0.0, False)
        module = innermost.f_globals.get("__name__", "")
        file = Path(innermost.f_code.co_filename).name
        place = f"{file}:{innermost.f_lineno} in {innermost.f_code.co_name}"
        waits = isinstance(module, str) and f"{module}.".startswith(tuple(f"{name}." for name in _WAITING))
        return Whereabouts(place, now - self._still_since, now - self._idle_since, waits)

    def _seconds_computed(self) -> float:
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread_id))
        except OSError:
            # The thread has ended.
            return 0.0
