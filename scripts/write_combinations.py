"""Write docs/combinations.md: the rows of diffusion_runtime/rules/combinations.yaml, and what options declare."""

from __future__ import annotations

import re
from pathlib import Path

from diffusion_runtime.rules.combinations import Combination, combinations, pipeline_combinations

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
TITLES = {
    "requests": "Within a request, and of a request with its model",
    "native": "Options of a native model",
    "pipelines": "Options and a pipeline of diffusers' own",
    "tuning": "Options and `tune`",
    "elsewhere": "Known from a file, a layer or a running process",
}
START = """# Combinations: which features do not go together

Each row is a pair that is refused, before the weights load where possible. The message tells why, and what to do.
The table is `diffusion_runtime/rules/combinations.yaml`; rows of diffusers' own pipelines are declared with the options
in `diffusion_runtime/config.py` (`python scripts/write_combinations.py` writes this page).
"""


def page_text() -> str:
    """Return the page."""
    parts = [START]
    table = {**combinations(), "pipelines": pipeline_combinations()}
    for about, title in TITLES.items():
        parts.append(f"\n## {title}\n\n| feature | with | message |\n|---|---|---|\n")
        # Features that are refused with the same one in the same words share a line, without the keys that differ.
        groups: dict[tuple[str, str], list[Combination]] = {}
        for row in table[about]:
            groups.setdefault((row.pair[0], row.says.partition(": ")[2]), []).append(row)
        for (first, words), group in groups.items():
            message = re.sub("{[^}]*}", "...", words if len(group) > 1 else group[0].says)
            parts.append(f"| {first} | {', '.join(row.pair[1] for row in group)} | `{message}` |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
