"""`--log-format json`: standard error as JSON lines, one object per line with stable keys.

Every object has `time` (UTC, ISO 8601), `level` (debug, info, warning, error), `event` and `message`. Further keys by
event: `log` has `logger`; `progress` has `item`, `stage`, `step`, `num_steps`, `seconds`; `table` has `columns` and
`rows`; `error` has `kind`, `exit_code` and, with --verbose, `trace`; `message` has none.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.progress import View

if TYPE_CHECKING:
    from diffusion_runtime.core.progress import Progress

LOG_FORMATS = ("text", "json")


class LogLines:
    """Writes objects to standard error, each at once."""

    def __init__(self) -> None:
        self._is_closed = False

    def put(self, level: str, message: str, event: str = "message", **values: Any) -> None:
        if self._is_closed:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": now, "level": level, "event": event, "message": message, **values}
        try:
            # In one write, so that lines of several processes do not mix.
            sys.stderr.write(json.dumps(line, default=str) + "\n")
            sys.stderr.flush()
        except OSError:
            # Standard error cannot be written, or its reader left. The command goes on.
            self._is_closed = True

    @contextmanager
    def progress(self, title: str) -> Iterator[View]:
        """A view for one item."""
        self.put("info", title)
        yield _LineView(self, title)


class _LineView(View):
    def __init__(self, lines: LogLines, title: str) -> None:
        self._lines = lines
        self._title = title

    def update(self, progress: Progress) -> None:
        self._lines.put(
            "info",
            f"{progress.stage} {progress.step}/{progress.num_steps}",
            event="progress",
            item=self._title,
            stage=progress.stage,
            step=progress.step,
            num_steps=progress.num_steps,
            seconds=round(progress.seconds, 4),
        )
