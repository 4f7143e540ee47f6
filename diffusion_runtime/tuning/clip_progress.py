"""Progress of a tuning over clips, some of which its journal keeps from before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffusion_runtime.core.progress import Progress
from diffusion_runtime.session.reporter import Reporter

# Seconds that no clip is made in; one out of a journal takes microseconds.
_LEAST_MADE = 0.005


@contextmanager
def counted_clips(reporter: Reporter, title: str, count: int) -> Iterator[Callable[[], None]]:
    """Context manager: what to call after each of `count` clips; those that were made tell the time that is left."""
    started = ended = time.perf_counter()
    finished = num_kept = 0
    with reporter.progress(f"{title}: {count} clips") as view:

        def done() -> None:
            nonlocal ended, finished, num_kept
            before, ended = ended, time.perf_counter()
            finished += 1
            num_kept += ended - before < _LEAST_MADE
            view.update(Progress("clips", finished, count, ended - started, num_kept=num_kept))

        yield done
