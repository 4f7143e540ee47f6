"""Which self-checks passed, on disk: one small file for a backend, the machine and the cases it was checked by.

A check that failed is not kept: a package may be built again under the same version.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.attention.measured_cache import cache_folder, complete_file, machine_facts
from diffusion_runtime.hardware import Hardware

SCHEMA = "diffusion_runtime.self_check/1"

_logger = logging.getLogger("diffusion_runtime.attention")


@dataclass(frozen=True)
class KeptCheck:
    """The largest error of a check that passed, and what it may be."""

    error: float
    bound: float


class SelfCheckCache:
    """The file of one check. cases: titles of its tests, which hold head size, dtype and features."""

    def __init__(self, backend: Backend, hardware: Hardware, cases: Sequence[str]) -> None:
        facts: dict[str, Any] = {
            "backend": backend.name,
            "cases": list(cases),
            "diffusion_runtime": str(importlib.import_module("diffusion_runtime").__version__),
            **machine_facts(hardware, [backend]),
        }
        # As it comes back from the file.
        self._facts = json.loads(json.dumps(facts, default=str))
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16]
        self.path: Path = cache_folder() / "self_check" / f"{backend.name}-{digest}.json"

    def read(self) -> KeptCheck | None:
        """None when this check was not made, or when its file is damaged, which is said."""
        try:
            values = json.loads(self.path.read_bytes())
            if not isinstance(values, dict) or values.get("schema") != SCHEMA or values.get("facts") != self._facts:
                raise ValueError(f"expected an object of schema {SCHEMA} about this machine")
            kept = KeptCheck(float(values["error"]), float(values["bound"]))
            if not 0 <= kept.error <= kept.bound:
                raise ValueError(f"an error of {kept.error} is not within {kept.bound}")
            return kept
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _logger.warning("the self-check in %s cannot be read (%s); it is made again", self.path, error)
            return None

    def write(self, error: float, bound: float) -> None:
        """A folder that cannot be written costs a line in the log and the next process a check."""
        values = {"schema": SCHEMA, "error": error, "bound": bound, "facts": self._facts}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with complete_file(self.path, json.dumps(values, indent=1) + "\n") as complete:
                os.replace(complete, self.path)
        except OSError as failure:
            _logger.warning("the self-check in %s cannot be kept (%s): each process makes it", self.path, failure)
