"""Tables for the terminal: attention report, plan of a dry run, facts; no cell is cut at any width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from diffusion_runtime.untrusted.printable import printable

# rich is imported where it is used: a shell's completion and --version need none of it.
if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

# A last column that is narrower than this breaks most lines after two or three words.
_MIN_LAST_COLUMN = 24
# A report from an untrusted file may be of any length.
_MAX_ROWS = 200
MAX_CELL_CHARACTERS = 500
_ROW_FIELDS = (
    "role",
    "backend",
    "implementation",
    "layers",
    "steps",
    "source",
    "reason",
    "phase",
    "keys",
    "kind",
    "is_guided",
)


@dataclass(frozen=True)
class _PlainTable:
    """A table whose cells are never cut: where the last column, which is wrapped, would become too narrow, each of its
    cells stands below its row."""

    columns: Sequence[Text]
    rows: Sequence[Sequence[Text]]
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        widths = [
            max(Measurement.get(console, options, cell).maximum for cell in column)
            for column in zip(self.columns, *self.rows, strict=True)
        ]
        num_gaps = len(widths) + 1
        if sum(widths[:-1]) + num_gaps + min(widths[-1], _MIN_LAST_COLUMN) <= options.max_width:
            yield self._side_by_side()
        else:
            yield from self._stacked(widths, options.max_width)

    def _side_by_side(self) -> Table:
        table = _empty_table(self.title)
        for column in self.columns[:-1]:
            table.add_column(column, no_wrap=True)
        table.add_column(self.columns[-1], overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def _stacked(self, widths: Sequence[int], max_width: int) -> Iterator[RenderableType]:
        """Each row in two: its first cells side by side, and the last one below them."""
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        first, indent = list(widths[:-1]), 4
        while sum(first) + len(first) + 1 > max_width and max(first) > 1:
            first[first.index(max(first))] -= 1
        yield Text(self.title, style="bold")
        for number, (*cells, last) in enumerate([self.columns, *self.rows]):
            line = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
            for width in first:
                line.add_column(width=width, overflow="fold", style="bold" if number == 0 else "")
            line.add_row(*cells)
            yield Padding(line, (0, 0, 0, 1))
            last.overflow = "fold"
            yield Padding(last, (0, 0, 0, indent), style="bold" if number == 0 else "none")
        yield Text()


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str) -> RenderableType:
    """A small table; cells are shown as they are, never as markup. Only the last column is wrapped."""
    return _PlainTable([_cell(name) for name in columns], [list(map(_cell, row)) for row in rows], title)


def figures_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A name and its figures in each row; figures of a column that have as many decimals stand point below point. A
    line break in a column's name is kept. To be printed with soft_wrap: it has one width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(column) for column in columns], *([_cell(value) for value in row] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 0), show_edge=False)
    for number, column in enumerate(zip(*cells, strict=True)):
        # Never narrower: a name or a figure in two parts cannot be read. Printed with soft_wrap, nothing is cut either.
        width = max(len(line) for cell in column for line in cell.plain.split("\n"))
        side: Literal["left", "right"] = "left" if number == 0 else "right"
        table.add_column(column[0], justify=side, no_wrap=True, min_width=width, vertical="bottom")
    for row_cells in cells[1:]:
        table.add_row(*row_cells)
    return table


def figures(values: Iterable[float | None], *, largest: float | None = None) -> list[str]:
    """Numbers with as many decimals each as the largest needs for three digits; `-` for None. largest: of several
    columns that share their decimals, None for this one's own."""
    known = list(values)
    top = max((value for value in known if value is not None), default=0.0) if largest is None else largest
    decimals = 0 if top >= 1000 else 1 if top >= 10 else 2
    return ["-" if value is None else f"{value:.{decimals}f}" for value in known]


def facts_table(facts: Iterable[tuple[str, object]], title: str) -> Table:
    """Names and values under a title."""
    table = _empty_table(title, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(_cell(name), _cell(value))
    return table


def table_values(renderable: RenderableType) -> tuple[str, list[str], list[list[str]]]:
    """Title, names of columns and cells of a table, for programs."""
    if isinstance(renderable, _PlainTable):
        rows = [[str(cell) for cell in row] for row in renderable.rows]
        return renderable.title.strip(), [str(column) for column in renderable.columns], rows
    from rich.table import Table

    assert isinstance(renderable, Table), f"no values are known of a {type(renderable).__name__}"
    cells = [[str(cell) for cell in column.cells] for column in renderable.columns]
    columns = [str(column.header) for column in renderable.columns if renderable.show_header]
    return str(renderable.title or "").strip(), columns, [list(row) for row in zip(*cells, strict=True)]


def _empty_table(title: str, *, show_header: bool = True) -> Table:
    from rich import box
    from rich.table import Table

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
    from rich.text import Text

    return Text(printable(str(value)))


def attention_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """AttentionReport.to_dict() of one or more generations: calls that were counted, equal rows together."""
    counts: dict[tuple[str, ...], int] = {}
    for report in reports:
        for row in mappings_in(report.get("rows")):
            key = tuple(str(row.get(name, ""))[:MAX_CELL_CHARACTERS] for name in _ROW_FIELDS)
            counts[key] = counts.get(key, 0) + (count if isinstance(count := row.get("count"), int) else 0)
    table = _empty_table("Attention that ran")
    # Of videos that were made chunk by chunk.
    has_phases, has_keys = (any(key[place] for key in counts) for place in (-4, -3))
    # Read in place, or copied before.
    more = [*(["phase"] if has_phases else []), *(["cached keys"] if has_keys else [])]
    for column in ("role", *more, "backend", "calls"):
        table.add_column(column, no_wrap=True, overflow="fold")
    # Lists of layers and steps, names of kernels and reasons may be long: these share the width that is left.
    for column in ("layers", "steps", "computed by, and why"):
        table.add_column(column, overflow="fold")
    for (role, backend, implementation, layers, steps, source, reason, phase, keys, kind, is_guided), count in islice(
        counts.items(), _MAX_ROWS
    ):
        # Where a list is wrapped, its numbers stay whole.
        lists = (numbers.replace(",", ", ") for numbers in (layers, steps))
        values = [*([phase] if has_phases else []), *([keys] if has_keys else [])]
        role = ", ".join(filter(None, (role, kind, "guided" if is_guided else "")))
        table.add_row(
            *map(_cell, (role, *values, backend, count, *lists)), _cell(f"{implementation}\n{source}: {reason}")
        )
    if len(counts) > _MAX_ROWS:
        table.add_row("...", *[""] * (4 + len(more)), _cell(f"{len(counts) - _MAX_ROWS} rows more"))
    return table


def mappings_in(value: object) -> list[Mapping[str, Any]]:
    """The mappings in a list; a report may come from an untrusted file and hold anything."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
