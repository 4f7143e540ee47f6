"""Tables keep words whole on a narrow terminal."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
from rich.console import Console
from tables import table

from diffusion_runtime.cli.report_remarks import remarks_of
from diffusion_runtime.cli.tables import attention_table, facts_table, plain_table
from diffusion_runtime.report.attention_report import AttentionReport, GraphReplays, ProductRow, StepRow


def test_the_attention_table_at_80_columns_breaks_no_word() -> None:
    row = {
        "role": "self",
        "backend": "video_sparse_attn",
        "implementation": "reference, 64-token blocks, 10 % of the pairs",
        "layers": "0-29",
        "steps": "0-49",
        "source": "default",
        "reason": "video_sparse_attn is not made for role 'cross'",
        "count": 1500,
    }
    console = Console(width=80, file=io.StringIO())
    console.print(attention_table([{"rows": [row]}]))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, said.splitlines())) <= 80
    words = said.split()
    for value in row.values():
        assert set(str(value).split()) - {"default"} <= set(words)


def test_the_attention_table_breaks_no_number() -> None:
    """`2` at a line's end and `2-23` below would read as steps of their own."""
    steps = "0-10,12,14-16,18,20,22-23,25,27,29-31,33,35,37,39,41,43,45,47-49"
    row = {"role": "self", "backend": "torch_sdpa", "count": 114, "layers": "0-5", "steps": steps, "reason": "x" * 40}
    console = Console(width=80, file=io.StringIO())
    console.print(attention_table([{"rows": [row]}]))
    words = console.file.getvalue().replace(",", " ").split()  # type: ignore[attr-defined]
    assert [word for word in words if word in steps.split(",")] == steps.split(",")


def test_guided_calls_of_a_role_are_a_row_of_their_own() -> None:
    row = {"role": "cross", "backend": "torch_sdpa", "count": 24, "layers": "0-5", "steps": "0-3"}
    console = Console(width=80, file=io.StringIO())
    console.print(attention_table([{"rows": [row, {**row, "is_guided": True, "count": 12}]}]))
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["cross", "torch_sdpa", "24"] in [line[:3] for line in lines]
    assert ["cross,", "guided", "torch_sdpa", "12"] in [line[:4] for line in lines]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_plain_table_cuts_nothing_at_any_width(width: int) -> None:
    rows = [
        (
            "ltx2.audio_to_video",
            "steps 0-11",
            "0-29,31,33",
            "sparse_video_gen_2_attn {'sparsity': 0.9}",
            "cli: default",
        ),
        ("self", "always", "0", "torch_sdpa", "platform: default of cpu, torch 2.13.0\nnot fa: " + "x" * 90),
    ]
    columns = ("role", "when", "layers", "backend", "why")
    console = Console(width=width, file=io.StringIO())
    console.print(plain_table(columns, rows, "Attention that would run"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= width
    # A column is narrower than some words, which are then broken; every character is still there.
    letters = Counter("".join(shown.split()))
    needed = Counter("".join("".join(map("".join, [columns, *rows])).split()))
    assert not needed - letters
    if width >= 80:
        assert {word for row in rows for cell in row for word in cell.split() if len(word) < 60} <= set(shown.split())


def test_long_names_of_facts_are_wrapped() -> None:
    console = Console(width=40, file=io.StringIO())
    console.print(facts_table([("x" * 60, "y" * 60)], "Recipe"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert (shown.count("x"), shown.count("y")) == (60, 60)


@table(
    ("row", "expected"),
    [
        (
            StepRow("cond", 1, 2, 1, "0,2", "1", ("easycache", "cfg_gate"), 0.0734),
            "steps of cond, expert 1: 2 computed (0,2), 1 reused by easycache, cfg_gate (1), largest accumulated error "
            "0.0734",
        ),
        (StepRow("uncond", 0, 3, 0, "0-2", ""), "steps of uncond, expert 0: 3 computed (0-2), 0 reused"),
        ({"branch": 1, "reused_by": "x", "largest_error": []}, "steps of 1, expert ?: ? computed (?), ? reused by"),
    ],
)
def test_steps_of_a_step_cache_are_remarks(row: Any, expected: str) -> None:
    """A report may come from a stranger's file."""
    steps = AttentionReport(steps=(row,)).to_dict()["steps"] if isinstance(row, StepRow) else [row]
    [remark] = remarks_of([{"steps": steps}])
    assert remark.startswith(expected)


@table(
    ("report", "expected"),
    [
        (
            AttentionReport(graphs=GraphReplays(12, 10, 1, 250_000_000, {"first passes": 2})),
            [
                "cuda graphs: 20 of 24 forward passes replayed from a CUDA graph (1 graph held in 0.250 GB); "
                "run eagerly: 4 first passes"
            ],
        ),
        (AttentionReport(products=(ProductRow("fp8", 7),)), ["quantised linear layers: 14 x fp8"]),
    ],
)
def test_remarks_sum_what_two_generations_counted(report: AttentionReport, expected: list[str]) -> None:
    assert remarks_of([report.to_dict(), report.to_dict()]) == expected


def test_remarks_of_a_report_with_values_of_other_types() -> None:
    hostile = {
        "products": [{"implementation": ["x"], "count": "many"}],
        "graphs": {"num_forwards": "x", "eager": [1]},
        "decoder_graphs": 7,
        "notes": "x",
    }
    assert len(remarks_of([hostile])) == 2
