"""Results of a step benchmark: one row per way of computing a denoising step, and all of them together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.benchmark.device_time import TimeShares

SCHEMA = "diffusion_runtime.bench_step/1"


@dataclass(frozen=True)
class StepRow:
    """One way to compute a step. name: `ours, fp8` or `diffusers, compile`.

    state: measured, wrong (the velocity differs from the first row's, or a replay from its eager pass, by more than
    rounding explains), failed, or left out (the mode cannot run there and was not asked for by name, or diffusers has
    no such forward); reason: why it is not `measured`. samples: milliseconds of one forward. host_ms: until a call
    returns on an idle device, None on a CPU, where that is the same. shares: where the device's time went, in another
    forward. matmul_tflops: of a large product in the row's dtype, just before. peak_bytes: of the device above what was
    there before the model, None on a CPU. first_s: seconds of the first forward, with compiling and capturing.
    difference: relative L2 from the first row's velocity. detail: the backend of self-attention, what is quantised.
    """

    name: str
    state: str
    reason: str = ""
    samples: tuple[float, ...] = ()
    host_ms: float | None = None
    shares: TimeShares | None = None
    matmul_tflops: float | None = None
    peak_bytes: int | None = None
    build_s: float | None = None
    first_s: float | None = None
    difference: float | None = None
    detail: str = ""

    @property
    def milliseconds(self) -> float | None:
        """The median of the samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def idle_ms(self) -> float | None:
        """Milliseconds in which the device waits for its host: those that no kernel accounts for. None on a CPU."""
        if self.milliseconds is None or self.shares is None or self.host_ms is None:
            return None
        return max(0.0, self.milliseconds - self.shares.total)

    def share_of_matmul(self, operations: float) -> float | None:
        """Return the share of the measured limit reached; 8-bit products may exceed 1. operations: of one forward."""
        if self.milliseconds is None or self.matmul_tflops is None:
            return None
        return operations / self.milliseconds / 1e9 / self.matmul_tflops


@dataclass(frozen=True)
class StepBenchmark:
    """All rows of one run. model: what was built, in words. num_blocks, whole_blocks: of the transformer; where they
    differ, the figures are of a part. operations: of one forward, with dense attention. device: in words."""

    model: str
    device: str
    versions: Mapping[str, str]
    dtype: str
    num_blocks: int
    whole_blocks: int
    operations: float
    matmul_size: int
    rows: tuple[StepRow, ...]

    @property
    def scale(self) -> float:
        """Factor from a part's times to the whole model's: the share of its blocks. Times outside the blocks are
        multiplied as well, so the result is an upper bound of those."""
        return self.whole_blocks / self.num_blocks

    @property
    def exit_code(self) -> int:
        """1 when a row is wrong or failed."""
        return int(any(row.state in ("wrong", "failed") for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": "step",
            "model": self.model,
            "device": self.device,
            "versions": dict(self.versions),
            "dtype": self.dtype,
            "num_blocks": self.num_blocks,
            "whole_blocks": self.whole_blocks,
            "scale_to_whole": self.scale,
            "operations": self.operations,
            "matmul_size": self.matmul_size,
            "rows": [self._row(row) for row in self.rows],
            "exit_code": self.exit_code,
        }

    def _row(self, row: StepRow) -> dict[str, Any]:
        milliseconds = row.milliseconds
        return {
            "name": row.name,
            "state": row.state,
            "reason": row.reason,
            "milliseconds": milliseconds,
            "whole_milliseconds": None if milliseconds is None else milliseconds * self.scale,
            "samples": list(row.samples),
            **({} if row.shares is None else row.shares.to_dict()),
            "idle_ms": row.idle_ms,
            "host_ms": row.host_ms,
            "matmul_tflops": row.matmul_tflops,
            "share_of_matmul": row.share_of_matmul(self.operations),
            "peak_bytes": row.peak_bytes,
            "build_s": row.build_s,
            "first_s": row.first_s,
            "difference": row.difference,
            "detail": row.detail,
        }
