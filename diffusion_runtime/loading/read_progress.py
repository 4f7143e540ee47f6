"""Progress of reading the weights of a part: bytes, their rate and the time left, said now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.loading.interface import OnStage
from diffusion_runtime.models.family import Model
from diffusion_runtime.weights.parallel_reads import num_bytes_read
from diffusion_runtime.weights.weight_files import COMPONENT_STEM, find_weight_files

# Seconds before the first line: a part that is read sooner needs none.
FIRST_LINE = 3.0
# Seconds between lines, and as a part of the time so far: 10 lines for a minute, 22 for an hour.
_BETWEEN_LINES = 5.0
_SHARE_OF_TIME = 0.25


class ReadProgress:
    """Says a phrase when it is entered, then every few seconds how much was read, and how long it took in the end.

        loading the transformer
        loading the transformer: 4.20 GB of 28.58 GB read, 1.10 GB/s, about 22 s left
        loaded the transformer: 28.58 GB read in 25.9 s, 1.10 GB/s

    say: called from a thread of its own but for the first and the last phrase; what it raises there is raised where
    this is left. part: `transformer`. total: bytes of the part's files, None where nobody knows. num_read: bytes that
    the process has read of weights so far; none of them are those of files that a library maps.
    """

    def __init__(
        self,
        say: OnStage,
        part: str,
        total: int | None = None,
        *,
        num_read: Callable[[], int] = num_bytes_read,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._say = say
        self._part = part
        self._total = total
        self._num_read = num_read
        self._clock = clock
        self._began, self._first_byte, self._before = 0.0, 0, 0
        self._left = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read-progress", daemon=True)

    def __enter__(self) -> Self:
        self._say(f"loading the {self._part}")
        self._began, self._first_byte = self._clock(), self._num_read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        if error is not None:
            return
        if self._failure is not None:
            raise self._failure
        num_bytes, seconds = self._so_far()
        if seconds < FIRST_LINE:
            return
        if num_bytes:
            rate = size_text(num_bytes / seconds)
            self._say(f"loaded the {self._part}: {size_text(num_bytes)} read in {seconds:.1f} s, {rate}/s")
        else:
            self._say(f"loaded the {self._part} in {seconds:.1f} s")

    def line(self) -> str:
        """Return how far it is now."""
        num_bytes, seconds = self._so_far()
        if not num_bytes and self._total is None:
            # A text encoder of transformers' own maps its files, whose pages nobody counts.
            return f"loading the {self._part}: {seconds:.0f} s so far"
        whole = f" of {size_text(self._total)}" if self._total is not None and num_bytes <= self._total else ""
        text = f"loading the {self._part}: {size_text(num_bytes)}{whole} read"
        if num_bytes == self._before:
            # Slow disks and shares that are gone look alike from here, and conversions read nothing either.
            return f"{text}, none since the last line; {seconds:.0f} s so far"
        self._before = num_bytes
        text += f", {size_text(num_bytes / seconds)}/s"
        if whole and self._total is not None:
            text += f", about {(self._total - num_bytes) * seconds / num_bytes:.0f} s left"
        return text

    def _so_far(self) -> tuple[int, float]:
        return self._num_read() - self._first_byte, self._clock() - self._began

    def _run(self) -> None:
        wait = FIRST_LINE
        try:
            while not self._left.wait(wait):
                self._say(self.line())
                wait = max(_BETWEEN_LINES, _SHARE_OF_TIME * self._so_far()[1])
        except BaseException as failure:
            self._failure = failure


def transformer_bytes(model: Model[Any, Any], components: list[str]) -> int | None:
    """Bytes of the files that the weights of these transformers are in; None where they cannot be listed."""
    elsewhere = {file.component: file for file in model.weights.files}
    total = 0
    with contextlib.suppress(ModelLoadError, OSError):
        for name in components:
            files = (
                elsewhere[name].files() if name in elsewhere else find_weight_files(model.folder / name, COMPONENT_STEM)
            )
            total += sum(path.stat().st_size for path in files)
        return total
    return None
