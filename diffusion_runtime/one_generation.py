"""Lock for one generation at a time per pipeline: a second call raises at once, from whichever thread it comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diffusion_runtime.errors import PipelineBusyError, PipelineClosedError


class OneGeneration:
    """The lock of a pipeline while it generates. Its model, including the caches of its decoder, serves one call at a
    time."""

    def __init__(self) -> None:
        # `setdefault` is atomic, and an interruption cannot come between acquiring and a `finally` that releases.
        self._running: dict[str, object] = {}
        self._is_closed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """For one generation; given back however it ends. Raises PipelineBusyError while another one runs,
        PipelineClosedError after `close`."""
        this = object()
        try:
            if self._running.setdefault("generation", this) is not this:
                raise PipelineBusyError(
                    "this pipeline is generating already, in another thread or around this call (on_progress): a "
                    "pipeline makes one generation at a time. Wait until it has ended, give several requests to one "
                    "generate(), or load a pipeline per thread"
                )
            if self._is_closed:
                raise PipelineClosedError("this pipeline is closed: load it again with load_pipeline()")
            yield
        finally:
            if self._running.get("generation") is this:
                del self._running["generation"]

    def close(self) -> None:
        """No generation from here on. Call it within `held`."""
        self._is_closed = True

    def __reduce__(self) -> tuple[type[OneGeneration], tuple[()]]:
        # A copy of a pipeline is another pipeline.
        return OneGeneration, ()
