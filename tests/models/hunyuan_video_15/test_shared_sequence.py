"""Both HunyuanVideo transformers over a sequence that two real processes share, against one process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The largest difference by model and way of sharing, over the largest value; a hang ends in an error."""
    result = tmp_path_factory.mktemp("shared") / "result.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "shared_sequence_worker.py"), str(result)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    errors: dict[str, float] = json.loads(result.read_text())
    return errors


@pytest.mark.parametrize("way", ["ulysses", "ring"])
@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15"])
def test_processes_together_equal_one_alone(measured: dict[str, float], name: str, way: str) -> None:
    assert measured[f"{name}, {way}"] < 1e-5
