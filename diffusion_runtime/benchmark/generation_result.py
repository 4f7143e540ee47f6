"""Results of a generation benchmark: seconds of each stage, of the first generation and of later ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA = "diffusion_runtime.bench_generate/1"
STAGES = ("text", "denoise", "decode", "write")


@dataclass(frozen=True)
class GenerationRow:
    """One way to generate. name: `ours` or `diffusers`.

    state: measured, failed, or left out (diffusers cannot run the folder); reason: why it is not `measured`. runs:
    seconds by stage of each generation, the first one cold; a stage that is not there was not computed. steps: mean
    seconds of a step after the first one, of each generation, None for one step. load_s: seconds until the model could
    generate. ran: the attention report of the last generation, by line.
    """

    name: str
    state: str
    reason: str = ""
    load_s: float | None = None
    runs: tuple[Mapping[str, float], ...] = ()
    steps: tuple[float | None, ...] = ()
    ran: tuple[str, ...] = ()

    @property
    def cold(self) -> Mapping[str, float]:
        return self.runs[0] if self.runs else {}

    @property
    def warm(self) -> Mapping[str, float]:
        """The median of each stage over all generations but the first."""
        later = self.runs[1:]
        return {stage: statistics.median(run[stage] for run in later) for stage in later[0]} if later else {}

    @property
    def step_s(self) -> float | None:
        """The median seconds of a step over all generations but the first."""
        later = [each for each in self.steps[1:] if each is not None]
        return statistics.median(later) if later else None


@dataclass(frozen=True)
class GenerationBenchmark:
    """All rows of one run. model, device: in words. remarks: what the figures are not of, such as random weights.
    settings: of ours, by the names of RuntimeConfig. file_format: of the files whose writing is timed. kept_in: the
    file that keeps our times for later plans, None where they are not kept."""

    model: str
    device: str
    versions: Mapping[str, str]
    dtype: str
    request: Mapping[str, Any]
    rows: tuple[GenerationRow, ...]
    remarks: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    file_format: str = "mp4"
    kept_in: str | None = None

    @property
    def exit_code(self) -> int:
        """1 when a row failed."""
        return int(any(row.state == "failed" for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": "generate",
            "model": self.model,
            "device": self.device,
            "versions": dict(self.versions),
            "dtype": self.dtype,
            "settings": dict(self.settings),
            "request": dict(self.request),
            "file_format": self.file_format,
            "remarks": list(self.remarks),
            "kept_in": self.kept_in,
            "rows": [
                {
                    "name": row.name,
                    "state": row.state,
                    "reason": row.reason,
                    "load_s": row.load_s,
                    "cold_s": dict(row.cold),
                    "warm_s": dict(row.warm),
                    "step_s": row.step_s,
                    "runs": [dict(run) for run in row.runs],
                    "ran": list(row.ran),
                }
                for row in self.rows
            ],
            "exit_code": self.exit_code,
        }
