"""Journal of a tuning: what was measured so far, on disk, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.untrusted.json_text import read_json_file

FORMAT = "diffusion_runtime.tune_journal/1"


class Journal:
    """Values by name. path: None keeps nothing on disk. identity: what the values depend on, beside their names; the
    file of another one is begun anew. num_found: values of an earlier run."""

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self._path = path
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
        self._values: dict[str, Any] = {}
        if path is not None and path.exists():
            content: Any = read_json_file(path, str(path))
            head = {"format": FORMAT, "identity": self._identity}
            if isinstance(content, dict) and {key: content.get(key) for key in head} == head:
                values = content.get("values")
                self._values = values if isinstance(values, dict) else {}
        self.num_found = len(self._values)

    @staticmethod
    def kept_in(path: Path) -> str:
        """Say what an interrupted tuning has left, and how to go on, for people."""
        content: Any = read_json_file(path, str(path)) if path.exists() else {}
        values = content.get("values") if isinstance(content, dict) else None
        if not isinstance(values, dict) or not values:
            return "nothing was finished"
        return (
            f"{len(values)} measurements are finished and kept in {path}; the same command again goes on from them "
            "(remove that file to begin anew)"
        )

    @staticmethod
    def beside(result: Path) -> Path:
        """Return the path of the journal of a tuning that writes `result`."""
        return result.with_name(f".{result.name}.journal.json")

    def has(self, name: str) -> bool:
        """Return whether a value is kept under this name."""
        return name in self._values

    def value(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the value kept under this name, else what `measure` returns (JSON values), which is then kept."""
        if name not in self._values:
            self.keep(name, measure())
        return self._values[name]

    def keep(self, name: str, value: Any) -> None:
        """Keep a value (JSON) under this name."""
        self._values[name] = value
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        content = {"format": FORMAT, "identity": self._identity, "values": self._values}
        publish_text(self._path, json.dumps(content))
