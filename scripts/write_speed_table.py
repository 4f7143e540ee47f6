"""Write the table of speed options of docs/faster.md from speed_options.yaml and the figures under benchmarks/results.

python scripts/write_speed_table.py           # the table in the page, made anew
python scripts/write_speed_table.py --check   # exit code 1 where the page says something else
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faster.md"
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- speed options: scripts/write_speed_table.py -->\n", "<!-- end of the speed options -->\n"
HEADER = "| option | best case measured | faster | when it loses | measured in |\n|---|---|---|---|---|\n"
# From best to least; a case below 1 is none.
LEAST = 1.0
MACHINE = "NVIDIA H200"


@functools.cache
def declared() -> dict[str, list[dict[str, Any]]]:
    return dict(read_packaged_yaml(Path(__file__).with_name("speed_options.yaml")))


def speed_up(row: Mapping[str, Any]) -> float:
    """The ratio of a row's two figures. Raises KeyError for a path that leads to no figure, or to several."""
    content = _result(row["file"])
    return float(found(content, row["over"])) / float(found(content, row["under"]))


def found(content: Any, path: Sequence[Any]) -> Any:
    """Return what a path leads to: a mapping in it picks the one element of a list that has its values."""
    for part in path:
        if isinstance(part, Mapping):
            picked = [each for each in content if all(each.get(key) == value for key, value in part.items())]
            if len(picked) != 1:
                raise KeyError(f"{path}: {len(picked)} elements have {part}")
            content = picked[0]
        else:
            content = content[part]
    return content


def is_of_the_machine(file: str) -> bool:
    return MACHINE in (RESULTS / f"{file}.json").read_text(encoding="utf-8")


def table() -> str:
    rows = sorted(((speed_up(row), row) for row in declared()["rows"]), key=lambda each: -each[0])
    lines = [
        f"| {row['option']} | {row['case']} | {ratio:.2f}x{'' if ' over ' in row['case'] else ' over without'} | "
        f"{row['loses']} | "
        f"[{row['file']}](../benchmarks/results/{row['file']}.json) |\n"
        for ratio, row in rows
    ]
    without = [
        f"- {', '.join(f'`{name}`' for name in other['names'])}: {other['why']}.\n" for other in declared()["others"]
    ]
    return HEADER + "".join(lines) + "\nNot in the table:\n\n" + "".join(without)


@functools.cache
def _result(file: str) -> Any:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    written, _, after = rest.partition(END)
    if "--check" in sys.argv:
        sys.exit(0 if written == table() else f"{PAGE} is not what was measured; run: python {sys.argv[0]}")
    PAGE.write_text(before + START + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
