"""Attention report: what ran, role x backend x implementation, counted call by call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from diffusion_runtime.step_info import LayerInfo, StepInfo


@dataclass(frozen=True)
class ReportRow:
    """One kind of attention call that happened.

    implementation: who computed it, as the backend names it; count: how many calls.
    layers, steps: which ones, as inclusive ranges such as `0-5`; source and reason: why this backend was chosen.
    """

    role: str
    backend: str
    implementation: str
    count: int
    layers: str
    steps: str
    source: str
    reason: str


@dataclass(frozen=True)
class LibraryAttention:
    """Attention that a library runs itself and this runtime neither chooses nor counts."""

    component: str
    library: str
    implementation: str


@dataclass(frozen=True)
class AttentionReport:
    """Every attention call of one generation, and the components whose attention is their library's own."""

    rows: tuple[ReportRow, ...] = ()
    libraries: tuple[LibraryAttention, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_calls(self) -> int:
        return sum(row.count for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a sidecar."""
        return {
            "num_calls": self.num_calls,
            "rows": [asdict(row) for row in self.rows],
            "libraries": [asdict(library) for library in self.libraries],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [
            f"{row.role}: {row.backend} ({row.implementation}) x {row.count}, layers {row.layers}, steps {row.steps}, "
            f"from {row.source}: {row.reason}"
            for row in self.rows
        ]
        lines += [
            f"{item.component}: {item.library}'s own attention ({item.implementation})" for item in self.libraries
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class _Tally:
    """The calls of one row while they are being counted."""

    def __init__(self) -> None:
        self.count = 0
        self.layers: set[int] = set()
        self.steps: set[int] = set()


class AttentionRecorder:
    """Counts the calls of one request; `report()` is what it saw so far."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str, str, str, str], _Tally] = {}
        self._libraries: list[LibraryAttention] = []
        self._notes: dict[str, None] = {}

    def record(
        self, layer: LayerInfo, step: StepInfo, *, backend: str, implementation: str, source: str, reason: str
    ) -> None:
        """Count one call."""
        key = (layer.role, backend, implementation, source, reason)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Tally()
        tally.count += 1
        tally.layers.add(layer.index)
        tally.steps.add(step.index)

    def record_library(self, component: str, library: str, implementation: str) -> None:
        """Say that a component ran its library's own attention."""
        row = LibraryAttention(component, library, implementation)
        if row not in self._libraries:
            self._libraries.append(row)

    def note(self, text: str) -> None:
        """Add a remark once, such as a choice that does not apply to a role."""
        self._notes[text] = None

    def report(self) -> AttentionReport:
        rows = [
            ReportRow(
                role,
                backend,
                implementation,
                tally.count,
                index_ranges(tally.layers),
                index_ranges(tally.steps),
                source,
                reason,
            )
            for (role, backend, implementation, source, reason), tally in self._tallies.items()
        ]
        return AttentionReport(tuple(rows), tuple(self._libraries), tuple(self._notes))


def index_ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} as `0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
