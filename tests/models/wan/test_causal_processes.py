"""A causal transformer whose key-value cache two and four real processes share by heads: as one process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_two_and_four_processes_equal_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "causal_worker.py"), str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        measured = json.loads((tmp_path / f"result-{rank}.json").read_text())
        refused = measured.pop("ring")
        assert "ring attention moves keys between processes" in refused
        assert "ulysses_degree" in refused
        assert len(measured) == 6
        for name, (error, share) in measured.items():
            # A number between two codes may take either: rounding differs in its last bit.
            assert error < (1e-5 if "Ring" in name else 0.02), (rank, name, error)
            # Each keeps the heads that it computes.
            assert share == 1 / int(name[0]), (rank, name)
