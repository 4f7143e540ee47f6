"""Lock for one generation at a time per pipeline: a second call raises at once, from whichever thread it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from diffusion_runtime.errors import PipelineBusyError, PipelineClosedError


class OneGeneration:
    """The lock of a pipeline while it generates. Its model, including the caches of its decoder, serves one call at a
    time. busy: the message of a second one."""

    def __init__(
        self,
        busy: str = "this pipeline is generating already, in another thread or around this call (on_progress): a "
        "pipeline makes one generation at a time. Wait until it has ended, give several requests to one generate(), or "
        "load a pipeline per thread",
    ) -> None:
        self._busy = busy
        # `setdefault` is atomic, and an interruption cannot come between acquiring and a `finally` that releases.
        self._running: dict[str, object] = {}
        self._is_closed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: hold the pipeline for one generation; released however it ends. Raises PipelineBusyError
        while another one runs, PipelineClosedError after `close`."""
        this = object()
        try:
            if self._running.setdefault("generation", this) is not this:
                raise PipelineBusyError(self._busy)
            if self._is_closed:
                raise PipelineClosedError("this pipeline is closed: load it again with load_pipeline()")
            yield
        finally:
            if self._running.get("generation") is this:
                del self._running["generation"]

    def close(self) -> None:
        """No generation from here on. Call it within `held`."""
        self._is_closed = True

    def __reduce__(self) -> tuple[type[OneGeneration], tuple[str]]:
        # A copy of a pipeline is another pipeline.
        return OneGeneration, (self._busy,)


class SharedGeneration:
    """One generation of a pipeline that a stream and its forks have in common: each computes in its turn, and the last
    one to leave ends it. resources: what is closed then."""

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        self._num_inside = 0
        self._turn = OneGeneration(
            "this stream, or a fork of the same video, is computing in another thread: one of them computes at a time. "
            "Ask for their chunks one after the other, in one thread, or load a pipeline per thread"
        )
        # Appended to and taken from without a lock: the garbage collector may close a stream between any two lines.
        self._closing: deque[Callable[[], None]] = deque()

    def join(self) -> None:
        """Count one more stream."""
        self._num_inside += 1

    def leave(self) -> None:
        """Count one stream less. Call it from the function given to `release`."""
        self._num_inside -= 1
        if self._num_inside == 0:
            self._resources.close()

    def release(self, close: Callable[[], None]) -> None:
        """Call `close` as soon as no stream computes: now, or at the end of the turn that computes, in its thread."""
        self._closing.append(close)
        self._close_waiting()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While one of them computes. Raises PipelineBusyError while another one does."""
        try:
            with self._turn.held():
                yield
        finally:
            # After the turn was given back: a `release` that came before it found the turn taken, and is here.
            self._close_waiting()

    def _close_waiting(self) -> None:
        while self._closing:
            try:
                with self._turn.held():
                    if self._closing:
                        self._closing.popleft()()
            except PipelineBusyError:
                # The holder of the turn looks here when it ends.
                return
