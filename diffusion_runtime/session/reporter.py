"""Reporter: interface for what a session reports (lines, errors, progress), to a terminal or a log."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from diffusion_runtime.core.progress import Progress


class ProgressView(Protocol):
    """Shows the progress of one generation."""

    def update(self, progress: Progress, /) -> None:
        """Show one report of the pipeline."""


class Reporter(Protocol):
    """For people: lines, errors, progress."""

    def say(self, text: str, /) -> None:
        """Print one line."""

    def error(self, text: str, trace: str = "", /) -> None:
        """Report an error. trace: where it was raised."""

    def progress(self, title: str, /) -> AbstractContextManager[ProgressView]:
        """Return a view for one generation."""


def seconds_text(timings: Mapping[str, Any]) -> str:
    """`text 0.1 s, denoise 4.2 s`."""
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timings.items() if isinstance(seconds, int | float))
