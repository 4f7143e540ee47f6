"""Work that a signal can end while one call of torch computes: the main thread waits, and is free to be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

# Of the thread that works. `app.main` ends the process at once where one is left behind by an interruption.
THREAD_NAME = "diffusion_runtime interruptible work"
_POLL_SECONDS = 0.2

T = TypeVar("T")


def run_interruptibly(work: Callable[[], T]) -> T:
    """The result of `work`, in a thread of its own; raises what it raises. Python handles a signal between two of its
    own instructions, and one call of attention over 26,000 tokens takes a CPU minutes."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # handed to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
    if errors:
        raise errors[0]
    return results[0]


def has_abandoned_work() -> bool:
    """Return whether a thread of `run_interruptibly` still computes."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())
