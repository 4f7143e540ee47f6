"""Results of an attention benchmark: one measurement per shape and backend, and all of them together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.benchmark.shapes import AttentionShape

SCHEMA = "diffusion_runtime.bench/1"
# measured: it ran and was right. refused: it does not support this shape. wrong: its error is above the bound. failed:
# it raised. skipped: the time limit was reached.
STATES = ("measured", "refused", "wrong", "failed", "skipped")


@dataclass(frozen=True)
class Measurement:
    """One backend at one shape. samples: milliseconds per call, one per round; empty unless it was measured.

    state: one of STATES; reason: why it is not `measured`. implementation: who computed it, as the backend reports.
    error: |out - exact| / |exact| on some queries, None without a finite result; bound: the largest allowed error, None
    for a backend that leaves pairs out by design. matmul_tflops: of a large matrix product in the same rounds, None
    where none was timed.
    """

    shape: AttentionShape
    backend: str
    state: str
    reason: str = ""
    implementation: str = ""
    samples: tuple[float, ...] = ()
    error: float | None = None
    bound: float | None = None
    matmul_tflops: float | None = None

    @property
    def milliseconds(self) -> float | None:
        """The median of the samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def tflops(self) -> float | None:
        """Operations of the exact call per second: for a backend that leaves pairs out, more than it computed."""
        median = self.milliseconds
        return None if median is None else self.shape.num_operations / median / 1e9

    @property
    def share_of_matmul(self) -> float | None:
        rate = self.tflops
        return None if rate is None or self.matmul_tflops is None else rate / self.matmul_tflops

    def to_dict(self) -> dict[str, Any]:
        return {
            "shape": self.shape.name,
            "backend": self.backend,
            "state": self.state,
            "said": self.reason,
            "implementation": self.implementation,
            "milliseconds": self.milliseconds,
            "fastest_milliseconds": min(self.samples, default=None),
            "slowest_milliseconds": max(self.samples, default=None),
            "num_samples": len(self.samples),
            "tflops": self.tflops,
            "matmul_tflops": self.matmul_tflops,
            "share_of_matmul": self.share_of_matmul,
            "error": self.error,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class AttentionBenchmark:
    """All measurements of one run. device: as `Hardware.describe` gives it, with its name; matmul_size: edge of the
    square matrices of the reference product; left_out: (backend, reason) of those that this machine cannot run."""

    device: str
    versions: Mapping[str, str]
    dtype: str
    matmul_size: int
    shapes: tuple[AttentionShape, ...]
    measurements: tuple[Measurement, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def exit_code(self) -> int:
        """1 when a backend was wrong or raised."""
        return int(any(item.state in ("wrong", "failed") for item in self.measurements))

    def of_shape(self, shape: AttentionShape) -> Sequence[Measurement]:
        """Return the measurements of a shape: the fastest first, those without a time last."""
        mine = [item for item in self.measurements if item.shape == shape]
        return sorted(mine, key=lambda item: (item.milliseconds is None, item.milliseconds or 0.0))

    def find(self, shape: str, backend: str) -> Measurement | None:
        """Return the measurement of a backend at a shape, by their names."""
        mine = (item for item in self.measurements if (item.shape.name, item.backend) == (shape, backend))
        return next(mine, None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": "attention",
            "device": self.device,
            "versions": dict(self.versions),
            "dtype": self.dtype,
            "matmul_size": self.matmul_size,
            "shapes": [shape.to_dict() for shape in self.shapes],
            "rows": [item.to_dict() for item in self.measurements],
            "left_out": [list(pair) for pair in self.left_out],
            "exit_code": self.exit_code,
        }
