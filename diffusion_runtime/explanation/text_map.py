"""The schedule of attention as text: one letter per step, layers with equal rows together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase

from diffusion_runtime.explanation.explanation import NOT_RUN, LayerSchedule
from diffusion_runtime.report.attention_report import index_ranges

# A role with more than these ways is shown by them and `?`.
_LETTERS = ascii_uppercase + ascii_lowercase


@dataclass(frozen=True)
class MapRow:
    """letters: one per step; layers: whose steps these are, as ranges; commit: that of commits, empty without a cache
    of keys."""

    role: str
    layers: str
    letters: str
    commit: str = ""


@dataclass(frozen=True)
class ScheduleMap:
    """legend: letter -> backend and density."""

    rows: tuple[MapRow, ...]
    legend: Mapping[str, str]


def schedule_map(schedule: Sequence[LayerSchedule]) -> ScheduleMap:
    legend: dict[str, str] = {}
    rows = []
    for role, equal in _equal_layers(schedule):
        first = equal[0]
        letters = [
            _letter(legend, describe(backend, density))
            for backend, density in zip(first.backends, first.density, strict=True)
        ]
        commit = "" if first.commit is None else _letter(legend, first.commit)
        rows.append(MapRow(role, index_ranges(row.index for row in equal), "".join(letters), commit))
    return ScheduleMap(tuple(rows), {letter: text for text, letter in legend.items()})


def describe(backend: str, density: float | None) -> str:
    """`video_sparse_attn, 0.10 of the pairs`."""
    if density is None:
        return f"{backend}, the content decides how many pairs"
    return backend if density == 1.0 or backend == NOT_RUN else f"{backend}, {density:.3g} of the pairs"


def in_tera(operations: float) -> str:
    """Four digits, `78,330` and `0.05389`; `-` for a part that is counted by its time alone."""
    tera = float(f"{operations / 1e12:.4g}")
    return "-" if not operations else f"{tera:,.0f}" if tera >= 1000 else f"{tera:g}"


def _equal_layers(schedule: Sequence[LayerSchedule]) -> Iterator[tuple[str, list[LayerSchedule]]]:
    """Layers of one role with the same steps."""
    groups: dict[tuple[object, ...], list[LayerSchedule]] = {}
    for row in schedule:
        groups.setdefault((row.role, row.backends, row.density, row.commit), []).append(row)
    for rows in groups.values():
        yield rows[0].role, rows


def _letter(legend: dict[str, str], text: str) -> str:
    if text not in legend:
        legend[text] = _LETTERS[len(legend)] if len(legend) < len(_LETTERS) else "?"
    return legend[text]
