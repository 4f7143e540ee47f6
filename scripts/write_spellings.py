"""Write the tables of docs/spellings.md: every row of diffusion_runtime/core/spellings.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from diffusion_runtime.core.spellings import KINDS, Spelling, table_of

PAGE = Path(__file__).parents[1] / "docs" / "spellings.md"
BEGIN, END = "<!-- {} of scripts/write_spellings.py -->", "<!-- end of the table -->"


def table_text(rows: Sequence[Spelling]) -> str:
    """Return the rows with a counterpart, then the others with the reason; spellings that share one share a line."""
    lines = []
    taken = joined([(row, (f"`{row.means}`", row.remark)) for row in rows if row.means])
    if taken:
        lines += ["| spelling | of | here | remark |", "|---|---|---|---|", *taken]
    refused = joined([(row, (row.remark, row.instead)) for row in rows if not row.means])
    if refused:
        lines += [""] if lines else []
        lines += ["| without a counterpart | of | why | instead |", "|---|---|---|---|", *refused]
    return "\n".join(lines)


def joined(rows: Sequence[tuple[Spelling, tuple[str, str]]]) -> list[str]:
    """Return one line of a table for all spellings with the same cells behind them, in the order of the first ones."""
    groups: dict[tuple[str, str], list[Spelling]] = {}
    for row, cells in rows:
        groups.setdefault(cells, []).append(row)
    lines = []
    # A long reason is written once.
    given: dict[str, str] = {}
    for (first, second), group in groups.items():
        origins = dict.fromkeys(origin for row in group for origin in row.origin.split(", "))
        names = ", ".join(f"`{row.spelling}`" for row in group)
        reason = f"as `{given[first]}`" if first in given else first
        if len(first.split()) > 6:
            given.setdefault(first, group[0].spelling)
        lines.append(f"| {names} | {', '.join(origins)} | {reason} | {second} |")
    return lines


def page_text(page: str) -> str:
    """The page with every table written anew."""
    for kind in KINDS:
        begin = BEGIN.format(kind)
        block = f"{begin}\n\n{table_text(list(table_of(kind).values()))}\n\n{END}"
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(END)}", lambda _, text=block: text, page, flags=re.DOTALL)
    return page


def main() -> None:
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
