"""Time limit of a tuning: a clip ends between two steps when the search's time is over, and a process that no longer
answers is ended."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

# Without a sign for so long after the end a clip hangs. FlashInfer compiles for 84 s on an H200, within the minutes.
QUIET_SECONDS = 60.0
# And for so many times the longest wait for a sign before: a step on a CPU takes minutes, and so does loading.
_QUIET_WAITS = 2


class TimeIsOverError(Exception):
    """The time for a clip is over; raised between two of its steps."""


class TimeLimit:
    """Signs of the clip under way, and its deadline, by `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = math.inf
        self._last_sign = clock()
        self._longest_wait = 0.0

    def sign(self, *_: object) -> None:
        """Note that the process answers. Raises TimeIsOverError past the deadline."""
        now = self._clock()
        self._longest_wait = max(self._longest_wait, now - self._last_sign)
        self._last_sign = now
        if self._last_sign > self._deadline:
            raise TimeIsOverError

    @contextlib.contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Context manager: what gives signs ends at a deadline."""
        before, self._deadline = self._deadline, deadline
        try:
            yield
        finally:
            self._deadline = before

    @contextlib.contextmanager
    def ending_what_hangs(
        self, end: float, end_process: Callable[[float], object], interval: float = 1.0, quiet: float = QUIET_SECONDS
    ) -> Iterator[None]:
        """Context manager: a thread calls `end_process`, with the seconds, once there was no sign for `quiet` seconds
        after `end`, or for twice the longest wait before if that is longer: a call that waits for a device cannot be
        interrupted."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(interval):
                patience = max(quiet, _QUIET_WAITS * self._longest_wait)
                if self._clock() - max(end, self._last_sign) > patience:
                    end_process(patience)
                    return

        thread = threading.Thread(target=watch, name="tune-time-limit", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
