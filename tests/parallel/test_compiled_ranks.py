"""Compiled blocks on real processes over gloo: Ulysses, ring and CFG parallel compute what eager blocks do, and
nothing is compiled anew over steps, layers, branches, texts and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_python import run_worker

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_compiled_blocks_on_processes_that_share_a_model(tmp_path: Path) -> None:
    run_worker(ROOT / "tests/parallel/compiled_worker.py", tmp_path)
    for rank in range(2):
        measured = json.loads((tmp_path / f"result-{rank}.json").read_text())
        # Both models have blocks of one kind, and one graph serves every way to share the tokens; a part of the weights
        # has another.
        assert set(measured["sound"]["graphs"]) == {1}
        assert measured["wan"]["graphs"] == [1] * 6 + [2] * 2
        assert len(measured["wan"]["errors"]) == 4
        errors = [*measured["wan"]["errors"].values(), *measured["sound"]["errors"].values()]
        assert max(errors) < 2e-6, measured
