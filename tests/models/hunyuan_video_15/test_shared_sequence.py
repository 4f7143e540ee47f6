"""Both HunyuanVideo transformers over a sequence that two real processes share, against one process alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_python import run_worker

# tests/models/test_tensor_parallel.py shares the tokens of both among processes too.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The largest difference by model and way of sharing, over the largest value; a hang ends in an error."""
    result = tmp_path_factory.mktemp("shared") / "result.json"
    run_worker(Path(__file__).parent / "shared_sequence_worker.py", result)
    errors: dict[str, float] = json.loads(result.read_text())
    return errors


@pytest.mark.parametrize("way", ["ulysses", "ring"])
@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_video_15"])
def test_processes_together_equal_one_alone(measured: dict[str, float], name: str, way: str) -> None:
    assert measured[f"{name}, {way}"] < 1e-5
