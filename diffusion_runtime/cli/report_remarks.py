"""Remarks of an attention report in addition to its rows, as lines for the terminal: steps of a step cache, quantised
linear layers, CUDA graphs, the key-value cache, the libraries' own attention, notes.

A report may come from a stranger's file and hold anything, so every value is read with its type checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from diffusion_runtime.cli.tables import MAX_CELL_CHARACTERS, mappings_in
from diffusion_runtime.report.attention_report import CacheRow, GraphReplays, LibraryAttention

_STEP_FIELDS = ("branch", "expert", "num_computed", "computed", "num_reused", "reused")

_CACHE_COUNTS = (
    "chunk_frames",
    "sink_frames",
    "cached_frames",
    "compressed_frames",
    "num_bytes",
    "num_shared_bytes",
    "num_commits",
    "num_saturated",
)


def remarks_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """reports: of AttentionReport.to_dict(). Each remark stands once; counts are summed over the reports."""
    steps = (_describe_steps(row) for row in _rows(reports, "steps"))
    libraries = (
        str(
            LibraryAttention(
                _text(item, "component"), _text(item, "library"), _text(item, "implementation"), _chosen_by(item)
            )
        )
        for item in _rows(reports, "libraries")
    )
    notes = (f"note: {note}" for report in reports if isinstance(found := report.get("notes"), list) for note in found)
    return list(
        dict.fromkeys(
            [
                *steps,
                *_products(reports),
                *_graphs(reports),
                *_caches(reports),
                *libraries,
                *notes,
            ]
        )
    )


def _rows(reports: Iterable[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    for report in reports:
        yield from mappings_in(report.get(name))


def _products(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    counts: dict[str, int] = {}
    for row in _rows(reports, "products"):
        how = _text(row, "implementation")
        counts[how] = counts.get(how, 0) + _number(row.get("count"))
    return [f"quantised linear layers: {count} x {how}" for how, count in counts.items()]


def _graphs(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in ("graphs", "decoder_graphs"):
        found = [value for report in reports if isinstance(value := report.get(name), Mapping)]
        if not found:
            continue
        eager: dict[str, int] = {}
        for value in found:
            reasons = value.get("eager")
            for reason, count in reasons.items() if isinstance(reasons, Mapping) else ():
                reason = str(reason)[:MAX_CELL_CHARACTERS]
                eager[reason] = eager.get(reason, 0) + _number(count)
        yield str(
            GraphReplays(
                num_forwards=sum(_number(value.get("num_forwards")) for value in found),
                num_replayed=sum(_number(value.get("num_replayed")) for value in found),
                # Of the pipeline, which the generations of a batch share.
                num_graphs=_number(found[-1].get("num_graphs")),
                pool_bytes=_number(found[-1].get("pool_bytes")),
                eager=eager,
                unit=_text(found[-1], "unit"),
            )
        )


def _caches(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for report in reports:
        found = report.get("cache")
        if isinstance(found, Mapping):
            window, page_size = found.get("window_frames"), found.get("page_size")
            yield str(
                CacheRow(
                    window_frames=window if isinstance(window, int) else None,
                    positions=_text(found, "positions"),
                    page_size=page_size if isinstance(page_size, int) else None,
                    dtype=_text({"dtype": "auto", **found}, "dtype"),
                    **{name: _number(found.get(name)) for name in _CACHE_COUNTS},
                )
            )


def _describe_steps(row: Mapping[str, Any]) -> str:
    """row: of StepRow."""
    methods = row.get("reused_by")
    by = ", ".join(map(str, methods))[:MAX_CELL_CHARACTERS] if isinstance(methods, list) and methods else "nothing"
    text = "steps of {branch}, expert {expert}: {num_computed} computed ({computed}), {num_reused} reused".format(
        **{name: _text(row, name) for name in _STEP_FIELDS}
    )
    error = row.get("largest_error")
    at_most = f", largest accumulated error {error:.3g}" if isinstance(error, float) else ""
    return text + (f" by {by} ({_text(row, 'reused')}){at_most}" if _text(row, "num_reused") != "0" else "")


def _chosen_by(item: Mapping[str, Any]) -> str:
    """Files of earlier versions have no such key."""
    return str(item.get("chosen", ""))[:MAX_CELL_CHARACTERS]


def _text(row: Mapping[str, Any], name: str) -> str:
    return str(row.get(name, "?"))[:MAX_CELL_CHARACTERS]


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
