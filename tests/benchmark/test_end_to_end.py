"""The table of whole generations: what was measured, what refused, what was not run; and the page that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.end_to_end import CASES, committed, table, with_table
from diffusion_runtime.models.published import published_models

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_every_case_names_a_model() -> None:
    known = {"shapes", *(model.name for model in published_models())}
    assert {case.split()[0] for case in CASES} <= known


def test_cells_are_figures_reasons_or_empty() -> None:
    def row(case: str, setting: str, **values: Any) -> dict[str, Any]:
        return {"case": case, "setting": setting, "machine": "H100", "state": "measured", **values}

    figures = {"model": "wan, 81 frames", "dtype": "bfloat16", "weights": "random", "together_s": 12.345}
    shown = table(
        {
            "rows": [
                row("wan", "fa4", **figures),
                row("wan", "sage_attn", state="refused", reason="not installed"),
                row("shapes", "fa4", **{**figures, "model": "shapes", "weights": "of the model", "together_s": 1.0}),
                row("flux", "fa4", state="over time"),
            ]
        }
    )
    assert shown.splitlines()[2:] == [
        "| wan, 81 frames | random | H100, bfloat16 | 12.35 | refused |",
        "| shapes | of the model | H100, bfloat16 | 1.00 |  |",
    ]
    assert table({"rows": []}).startswith("No run yet")


def test_the_page_shows_the_committed_results() -> None:
    page = PAGE.read_text()
    assert with_table(page, committed()) == page, "run: python -m benchmarks.end_to_end --write docs/benchmarks.md"
