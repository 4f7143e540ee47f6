"""Live state of jobs: what is known beside their rows while this process runs, and who waits for a change of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

# Percent of a job at the beginning and the end of each stage; 100 is a published file.
_SPANS = {"text": (0, 2), "denoise": (2, 90), "decode": (90, 98), "stream": (2, 98), "write": (99, 99)}


@dataclass
class Live:
    """State of a job beside its row, while this process runs. since: of time.monotonic, when this process took it;
    version: rises with every change."""

    since: float = field(default_factory=time.monotonic)
    version: int = 0
    stage: str | None = None
    step: int | None = None
    num_steps: int | None = None
    progress: int = 0
    previews: list[dict[str, Any]] = field(default_factory=list)
    # Of a stream: the chunks so far, as the engine sent them.
    chunks: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        """Tell all that wait of a change."""
        self.version += 1
        self.changed.set()
        self.changed = asyncio.Event()

    def advance(self, stage: str, step: int, num_steps: int) -> None:
        """Note that `step` of a stage are done. The progress never falls while a job runs, though it is made again."""
        first, last = _SPANS.get(stage, (0, 0))
        self.stage, self.step, self.num_steps = stage, step, num_steps
        self.progress = max(self.progress, int(first + (last - first) * step / num_steps))
        self.note()
