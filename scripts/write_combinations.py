"""Write docs/combinations.md: the rows of diffusion_runtime/rules/combinations.yaml, and what options declare."""

from __future__ import annotations

import re
from pathlib import Path

from diffusion_runtime.rules.combinations import combinations, pipeline_combinations

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
TITLES = {
    "requests": "Within a request, and of a request with its model",
    "native": "Options of a native model",
    "pipelines": "Options and a pipeline of diffusers' own",
    "tuning": "Options and `tune`",
    "elsewhere": "Known from a file, a layer or a running process",
}
START = """# Combinations: which features do not go together

Each row is a pair that is refused, with the message: why, and what to do instead, before the weights load where that is
possible. The table is `diffusion_runtime/rules/combinations.yaml`, and `diffusion_runtime/config.py` for pipelines of
diffusers' own (`python scripts/write_combinations.py` writes this page).
"""


def page_text() -> str:
    """Return the page."""
    parts = [START]
    table = {**combinations(), "pipelines": pipeline_combinations()}
    for about, title in TITLES.items():
        parts.append(f"\n## {title}\n\n| feature | with | message |\n|---|---|---|\n")
        parts += [f"| {row.pair[0]} | {row.pair[1]} | `{re.sub('[{}]', '', row.says)}` |\n" for row in table[about]]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
