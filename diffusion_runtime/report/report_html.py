"""An attention report as HTML, for notebooks: its rows as a table, and the density by layer and step as inline SVG.

One self-contained piece: no script, no style sheet, no request. Every text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

_COLUMNS = ("role", "backend", "implementation", "count", "layers", "steps", "source", "reason")
_CELL = "padding:2px 8px;text-align:left;vertical-align:top;border-bottom:1px solid #8884"
# Larger reports state how many rows are left out.
_MAX_ROWS, _MAX_LAYERS = 60, 400
_MAX_TEXT = 300


def report_html(report: Mapping[str, Any]) -> str:
    """report: AttentionReport.to_dict()."""
    return "".join(_parts(report))


def _parts(report: Mapping[str, Any]) -> Iterator[str]:
    rows = report["rows"]
    yield f'<div style="font:13px sans-serif;overflow-x:auto"><b>Attention that ran</b>: {report["num_calls"]} calls'
    yield '<table style="border-collapse:collapse;margin:4px 0"><tr>'
    yield "".join(f'<th style="{_CELL}">{name}</th>' for name in _COLUMNS)
    yield "</tr>"
    for row in rows[:_MAX_ROWS]:
        named = {**row, "role": f"{row['role']}, guided"} if row.get("is_guided") else row
        cells = (html.escape(str(named[name])[:_MAX_TEXT]) for name in _COLUMNS)
        yield "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"
    yield "</table>"
    if len(rows) > _MAX_ROWS:
        yield f"<div>and {len(rows) - _MAX_ROWS} rows more</div>"
    for library in report["libraries"]:
        text = f"{library['component']}: {library['library']}'s own attention ({library['implementation']})"
        yield f"<div>{html.escape(text[:_MAX_TEXT])}</div>"
    for note in report["notes"]:
        yield f"<div>note: {html.escape(note[:_MAX_TEXT])}</div>"
    yield from _maps(report["density"])
    yield "</div>"


def _maps(density: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one map per role: layers from top to bottom, steps from left to right."""
    for role, of_role in groupby(density, key=lambda row: row["role"]):
        rows = list(of_role)[:_MAX_LAYERS]
        num_steps = max(len(row["steps"]) for row in rows)
        across, down = max(6, min(24, 900 // max(1, num_steps))), max(6, min(16, 480 // len(rows)))
        name = f"density of {role}, {len(rows)} layers (down) by {num_steps} steps (across)"
        yield f"<div><b>{html.escape(name)}</b>: white 0, dark blue 1 (dense), grey no call</div>"
        size = f'width="{across * num_steps}" height="{down * len(rows)}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(name)}" {size}>'
        for index, row in enumerate(rows):
            first = 0
            # Steps with equal shares are one rectangle.
            for share, run in groupby(row["steps"]):
                length = len(list(run))
                steps = f"step {first}" if length == 1 else f"steps {first}-{first + length - 1}"
                shown = "no call" if share is None else f"{share:.3g}"
                box = f'x="{first * across}" y="{index * down}" width="{length * across}" height="{down - 1}"'
                title = f"layer {row['layer']}, {steps}: {shown}"
                yield f'<rect {box} fill="{_colour(share)}"><title>{title}</title></rect>'
                first += length
        yield "</svg>"


def _colour(share: float | None) -> str:
    if share is None:
        return "#ccc"
    return f"hsl(212 80% {round(97 - 72 * share)}%)"
