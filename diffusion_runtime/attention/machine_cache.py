"""The cache of a machine, on disk: which backend was fastest per shape class (autotune), and which self-checks passed.

One small file per entry makes writers independent: a file appears whole or not at all. Of two processes that measure
the same class at the same time the first to finish decides for both. A self-check that failed is not kept: a package
may be built again under the same version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.core.cache_folder import cache_root, complete_file
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.untrusted.json_text import read_json_file

MEASURED_SCHEMA = "diffusion_runtime.measured_attention/1"
SELF_CHECK_SCHEMA = "diffusion_runtime.self_check/1"

_logger = logging.getLogger("diffusion_runtime.attention")


@dataclass(frozen=True)
class Choice:
    """The backend that was fastest. milliseconds: the median of a call, by backend, of all that were timed."""

    backend: str
    milliseconds: Mapping[str, float]

    @classmethod
    def from_file(cls, path: Path) -> Choice:
        """Raises OSError, and ValueError for a file that holds anything else."""
        os.stat(path)
        # Its errors are ConfigErrors, which are ValueErrors.
        values = read_json_file(path)
        if not isinstance(values, dict) or values.get("schema") != MEASURED_SCHEMA:
            raise ValueError(f"expected an object of schema {MEASURED_SCHEMA}")
        backend, times = values.get("backend"), values.get("milliseconds")
        if not isinstance(backend, str) or not isinstance(times, dict) or backend not in times:
            raise ValueError("expected a backend and the milliseconds that it was chosen by")
        return cls(backend, {str(name): float(time) for name, time in times.items()})


def cache_folder() -> Path:
    """Return the folder of measurements."""
    return cache_root() / "attention"


class MeasuredCache:
    """The choices of one machine. machine: all that they depend on besides the shape: chip, driver, versions."""

    def __init__(self, machine: Mapping[str, Any]) -> None:
        text = json.dumps(machine, sort_keys=True, default=str)
        self._machine = machine
        self._name = hashlib.sha256(text.encode()).hexdigest()[:16]

    def path(self, shape_class: str) -> Path:
        """The file of a shape class, such as `self-q32768-k32768`."""
        return cache_folder() / self._name / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', shape_class)}.json"

    def read(self, shape_class: str) -> Choice | None:
        """Return what was measured; None when nothing was, or when the file is damaged, which is logged."""
        path = self.path(shape_class)
        try:
            return Choice.from_file(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            _logger.warning("the measurement in %s cannot be read (%s); it is made again", path, error)
            return None

    def write(self, shape_class: str, choice: Choice) -> Choice:
        """Keep a choice, and return what is kept: another process's when it was first.

        A folder that cannot be written costs a line in the log and the next process a measurement.
        """
        path = self.path(shape_class)
        values = {
            "schema": MEASURED_SCHEMA,
            **asdict(choice),
            "shape_class": shape_class,
            "machine": dict(self._machine),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with complete_file(path, json.dumps(values, indent=1, default=str) + "\n") as complete:
                try:
                    os.link(complete, path)
                except FileExistsError:
                    with contextlib.suppress(OSError, ValueError, TypeError):
                        return Choice.from_file(path)
                    os.replace(complete, path)
                except OSError:  # a file system without hard links
                    os.replace(complete, path)
        except OSError as error:
            _logger.warning("the measurement of %s cannot be kept (%s): each process makes its own", shape_class, error)
        return choice


def machine_facts(hardware: Hardware, candidates: Sequence[Backend]) -> dict[str, Any]:
    """All that a measurement depends on besides the shape: the chip, its driver, and every version that takes part."""
    return {
        "platform": hardware.platform,
        "device": hardware.device_name,
        "capability": hardware.capability,
        "cudnn": hardware.cudnn,
        "torch": torch.__version__,
        "driver": _driver(hardware.platform),
        "num_threads": torch.get_num_threads() if hardware.platform == "cpu" else None,
        "packages": dict(hardware.packages),
        "candidates": {backend.name: backend.probe(hardware).version for backend in candidates},
    }


@functools.cache
def _driver(platform: str) -> str:
    """The version of the GPU's driver as its kernel module states it, and of the CUDA that torch was built for."""
    module = {"cuda": "nvidia", "rocm": "amdgpu"}.get(platform, "")
    path = Path("/sys/module") / module / "version"
    version = path.read_text().strip() if module and path.is_file() else ""
    return f"{version} {torch.version.cuda}" if platform == "cuda" else version


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
        """None when this check was not made, or when its file is damaged, which is logged."""
        try:
            values = json.loads(self.path.read_bytes())
            if (
                not isinstance(values, dict)
                or values.get("schema") != SELF_CHECK_SCHEMA
                or values.get("facts") != self._facts
            ):
                raise ValueError(f"expected an object of schema {SELF_CHECK_SCHEMA} about this machine")
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
        values = {"schema": SELF_CHECK_SCHEMA, "error": error, "bound": bound, "facts": self._facts}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with complete_file(self.path, json.dumps(values, indent=1) + "\n") as complete:
                os.replace(complete, self.path)
        except OSError as failure:
            _logger.warning("the self-check in %s cannot be kept (%s): each process makes it", self.path, failure)
