"""Write the tables of docs/spellings.md: every row of diffusion_runtime/core/spellings.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from diffusion_runtime.core.spellings import KINDS, Spelling, table_of

PAGE = Path(__file__).parents[1] / "docs" / "spellings.md"
BEGIN, END = "<!-- {} of scripts/write_spellings.py -->", "<!-- end of the table -->"


def table_text(rows: Sequence[Spelling]) -> str:
    """Return the rows with a counterpart, then the others with the reason; spellings that share one stand in one line."""
    lines = []
    taken = joined([(row.spelling, (row.origin, f"`{row.means}`", row.remark)) for row in rows if row.means])
    if taken:
        lines += ["| spelling | of | here | remark |", "|---|---|---|---|", *taken]
    refused = joined([(row.spelling, (row.origin, row.remark, row.instead)) for row in rows if not row.means])
    if refused:
        lines += [""] if lines else []
        lines += ["| without a counterpart | of | why | instead |", "|---|---|---|---|", *refused]
    return "\n".join(lines)


def joined(rows: Sequence[tuple[str, tuple[str, str, str]]]) -> list[str]:
    """Return one line of a table for all spellings with the same other cells, in the order of the first ones."""
    spellings: dict[tuple[str, str, str], list[str]] = {}
    for spelling, cells in rows:
        spellings.setdefault(cells, []).append(f"`{spelling}`")
    return [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in spellings.items()]


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
