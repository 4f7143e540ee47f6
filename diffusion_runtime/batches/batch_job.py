"""Batch job: what a batch is given, and how far it is."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_runtime.batches.row_files import RowFile
from diffusion_runtime.batches.rows import Row
from diffusion_runtime.config import runtime_options
from diffusion_runtime.errors import BatchFailedError

# Rows among which those that may run together are looked for, in units of a batch.
_WINDOW = 64
_LINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """rows: where they are. folder: where results go. config: the fields of RuntimeConfig, as JSON; loras: files that
    rows may name, likewise. ray: the address of a cluster, None for an engine of this machine; replicas: the least and
    the most engines of a cluster. say, count: told of lines, and of progress with its values."""

    rows: RowFile
    folder: Path
    config: Mapping[str, Any]
    loras: Mapping[str, Any]
    file_format: str | None = None
    max_batch_size: int | None = None
    resumes: bool = False
    ray: str | None = None
    replicas: tuple[int, int] = (1, 1)
    say: Callable[[str], None] = lambda _: None
    count: Callable[..., None] = lambda *_, **__: None

    @property
    def model(self) -> str:
        """Return a digest of the model and of the options that change what is made, as `generate --resume` compares
        them."""
        options = {name: self.config[name] for name, option in runtime_options().items() if option.changes_output}
        return hashlib.sha256(json.dumps([options, self.loras], sort_keys=True).encode()).hexdigest()

    @property
    def given(self) -> dict[str, Any]:
        """Return what an engine is started with."""
        return {"config": self.config, "loras": self.loras}

    @property
    def window(self) -> int:
        return _WINDOW * (self.max_batch_size or 4)


@dataclass
class Tally:
    """Progress of a job. num_rows: of all, None where nobody knows yet. settings: the first row of each."""

    num_rows: int | None = None
    settings: dict[bytes, Row] = field(default_factory=dict)
    made: int = 0
    was_there: int = 0
    failed: int = 0
    first_failure: str = ""
    _began: float = field(default_factory=time.monotonic)
    _said: float = 0.0

    @property
    def num_ended(self) -> int:
        return self.made + self.was_there + self.failed

    @property
    def exit_code(self) -> int:
        return BatchFailedError.exit_code if self.failed else 0

    def begin(self) -> None:
        """Begin to measure the time of a row."""
        self._began = self._said = time.monotonic()

    def line(self) -> str:
        """Return `120/200 rows, 2 failed, 3.1 s a row, ETA 4 min`."""
        of = "" if self.num_rows is None else f"/{self.num_rows}"
        parts = [f"{self.num_ended}{of} rows"]
        parts += [f"{self.was_there} made before"] * bool(self.was_there) + [f"{self.failed} failed"] * bool(
            self.failed
        )
        if self.made and (seconds := (time.monotonic() - self._began) / (self.made + self.failed)):
            parts.append(f"{seconds:.2f} s per row")
            if self.num_rows is not None and self.num_rows > self.num_ended:
                parts.append(f"ETA {_duration((self.num_rows - self.num_ended) * seconds)}")
        return ", ".join(parts)

    def is_due(self) -> bool:
        """Return whether it is time for another line."""
        now = time.monotonic()
        if now - self._said < _LINE_SECONDS:
            return False
        self._said = now
        return True

    def to_dict(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "made": self.made, "made_before": self.was_there, "failed": self.failed}


def _duration(seconds: float) -> str:
    """Return `40 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
