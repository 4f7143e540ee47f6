"""Admin state: what an admin asked of a running server, which a new process has not: default LoRA files, profiles."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TRACE_ID = re.compile(r"trace_[0-9a-f]{32}")
_MAX_TRACES = 4


class Profiles:
    """Traces of one server, in `folder`; those of an earlier process are removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, str] = {}
        self._waiting: tuple[str, int] | None = None
        for path in folder.glob("trace_*"):
            path.unlink()

    def start(self, num_steps: int) -> str:
        """Have the next batch recorded, instead of what waited for it before; returns the id of its trace."""
        self.stop()
        trace_id = f"trace_{secrets.token_hex(16)}"
        self._waiting = (trace_id, num_steps)
        self._states[trace_id] = "waiting"
        while len(self._states) > _MAX_TRACES:
            oldest = next(iter(self._states))
            del self._states[oldest]
            with contextlib.suppress(OSError):
                self.path(oldest).unlink()
        return trace_id

    def stop(self) -> str | None:
        """Have nothing recorded; returns the id of what waited."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        self._states[waiting[0]] = "stopped before a batch began"
        return waiting[0]

    def take(self) -> Mapping[str, Any] | None:
        """Return what the batch that begins now is to record, None for nothing."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        trace_id, num_steps = waiting
        self._states[trace_id] = "recording"
        self._folder.mkdir(exist_ok=True)
        return {"id": trace_id, "num_steps": num_steps, "target": str(self.path(trace_id))}

    def note(self, trace_id: str, error: str | None) -> None:
        """Note that a trace was written, or why not."""
        if trace_id in self._states:
            self._states[trace_id] = "ready" if error is None else error

    def state(self, trace_id: str) -> str | None:
        """Return `waiting`, `recording`, `ready`, or why there is none; None for an id that is not known."""
        return self._states.get(trace_id)

    def path(self, trace_id: str) -> Path:
        assert TRACE_ID.fullmatch(trace_id)
        return self._folder / f"{trace_id}.json"


class DefaultLoras:
    """LoRA files of requests that name none. given: name and scale of each. last: those that were given last and were
    some."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.last: list[dict[str, Any]] = []

    def give(self, loras: Sequence[dict[str, Any]]) -> None:
        self.given = list(loras)
        self.last = self.given or self.last
