"""Tables for people: what attention ran, what would run, how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from diffusion_runtime.cli.terminal import printable

# A report from a stranger's file may be of any length.
_MAX_ROWS = 200
_MAX_CELL_CHARACTERS = 500
_ROW_FIELDS = ("role", "backend", "implementation", "layers", "steps", "source", "reason")


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str) -> Table:
    """A small table; cells are shown as they are, never as markup. Only the last column is wrapped."""
    table = _empty_table(title)
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True, overflow="fold")
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def facts_table(facts: Iterable[tuple[str, object]], title: str) -> Table:
    """Names and values under a title."""
    table = _empty_table(title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(_cell(name), _cell(value))
    return table


def _empty_table(title: str, *, show_header: bool = True) -> Table:
    return Table(
        box=box.SIMPLE_HEAD if show_header else None,
        show_header=show_header,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 2, 0, 0) if not show_header else (0, 1, 0, 0),
    )


def _cell(value: object) -> Text:
    return Text(printable(str(value)))


def attention_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """AttentionReport.to_dict() of one or more generations: calls that were counted, equal rows together."""
    counts: dict[tuple[str, ...], int] = {}
    for report in reports:
        for row in _mappings(report.get("rows")):
            key = tuple(str(row.get(name, ""))[:_MAX_CELL_CHARACTERS] for name in _ROW_FIELDS)
            counts[key] = counts.get(key, 0) + (count if isinstance(count := row.get("count"), int) else 0)
    table = _empty_table("Attention that ran")
    for column in ("role", "backend", "calls"):
        table.add_column(column, no_wrap=True, overflow="fold")
    # Lists of layers and steps, names of kernels and reasons may be long: these share the width that is left.
    for column in ("layers", "steps", "computed by, and why"):
        table.add_column(column, overflow="fold")
    for (role, backend, implementation, layers, steps, source, reason), count in islice(counts.items(), _MAX_ROWS):
        table.add_row(
            *map(_cell, (role, backend, count, layers, steps)), _cell(f"{implementation}\n{source}: {reason}")
        )
    if len(counts) > _MAX_ROWS:
        table.add_row("...", "", "", "", "", _cell(f"{len(counts) - _MAX_ROWS} rows more"))
    return table


def remarks_of(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """What several reports say besides their rows, each once: the libraries' own attention, and notes."""
    libraries = [
        f"{item.get('component')}: attention of {item.get('library')} ({item.get('implementation')}), not chosen here"
        for report in reports
        for item in _mappings(report.get("libraries"))
    ]
    notes = [report.get("notes") for report in reports]
    said = [f"note: {note}" for several in notes if isinstance(several, list) for note in several]
    return list(dict.fromkeys([*libraries, *said]))


def _mappings(value: object) -> list[Mapping[str, Any]]:
    """The mappings in a list; a report may come from a stranger's file and hold anything."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
