"""The table of quality by backend: rows of several machines, reasons that stay, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.backend_quality import NO_GPU_RUN, RESULTS, merged, tables, with_tables

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"
RATES = {"joint": {"rate": 1.0, "low": 0.7, "high": 1.0}}
FIGURES = {"density": 1.0, "denoise_seconds": 0.1, "latent_relative_l2": 0.0, "psnr_db": 100.0,
           "accuracy": {"one_object": RATES, "two_objects": RATES}}  # fmt: skip


def document(device: str, dtype: str, *rows: dict[str, Any]) -> dict[str, Any]:
    about = {"model": "shapes", "dtype": dtype, "preset": "draft", "num_prompts": 8}
    return {**about, "machine": {"device": device}, "rows": [{"setting": "", "options": {}, **row} for row in rows]}


def test_rows_of_several_machines_stand_side_by_side() -> None:
    refused = {"backend": "fa", "refused": [["fa", "FlashAttention is not installed; fix: pip install it"]]}
    cpu = document("EPYC", "float32", {"backend": "torch_sdpa", **FIGURES}, refused)
    times = document("EPYC", "float32", {"backend": "torch_sdpa", "cpu_seconds": 2.0}, refused)
    gpu = document("H100", "bfloat16", {"backend": "torch_sdpa", **FIGURES}, {"backend": "fa", **FIGURES})
    joined = merged([merged([cpu, times]), gpu])
    found = {(row["device"], row["backend"]): row for row in joined["rows"]}
    assert found["EPYC", "fa"]["refused"] == refused["refused"]
    assert "refused" not in found["H100", "fa"]
    assert (found["EPYC", "torch_sdpa"]["cpu_seconds"], found["H100", "torch_sdpa"].get("cpu_seconds")) == (2.0, None)
    assert [machine["device"] for machine in joined["machines"]] == ["EPYC", "H100"]
    # Another preset is another table, not another figure in the same row.
    whole = {**gpu, "preset": "default", "rows": [{**gpu["rows"][0], "density": 0.5}]}
    assert [row["density"] for row in merged([gpu, whole])["rows"] if row["backend"] == "torch_sdpa"] == [1.0, 0.5]
    # A figure takes the place of a refusal on the same machine, and not the other way round.
    later = document("EPYC", "float32", {"backend": "fa", **FIGURES})
    for order in ([cpu, later], [later, cpu]):
        row = next(row for row in merged(order)["rows"] if row["backend"] == "fa")
        assert "refused" not in row
    text = tables(joined)
    assert "`shapes`, EPYC, float32, preset draft, 8 prompts of each kind:" in text
    assert "Refused there: `fa`." in text
    assert "| `fa` | 1.00 | 0.100 s |" in text
    assert NO_GPU_RUN not in text
    assert tables(merged([cpu, times])).endswith(NO_GPU_RUN)
    in_batches = {key: value for key, value in FIGURES.items() if key != "denoise_seconds"}
    of_batches = document("H200", "bfloat16", {"backend": "torch_sdpa", **in_batches})
    assert "| `torch_sdpa` | 1.00 | | 1.00 (0.70-1.00) |" in tables(of_batches)


def test_the_page_shows_the_committed_results() -> None:
    page = PAGE.read_text()
    assert with_tables(page, json.loads(RESULTS.read_text())) == page, (
        "run: python -m benchmarks.backend_quality --write docs/quality.md"
    )
