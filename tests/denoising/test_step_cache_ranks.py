"""Step caches on 4 processes, CFG parallel among them: the decisions and the latents of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_python import run_worker

ROOT = Path(__file__).parents[2]


def test_every_process_decides_as_one_alone(tmp_path: Path) -> None:
    run_worker(ROOT / "tests/denoising/step_cache_worker.py", tmp_path)
    results = sorted(tmp_path.glob("result-*.json"))
    assert len(results) == 4
    for path in results:
        for row in json.loads(path.read_text()):
            where = f"{path.stem}, {row['mesh']}, {row['cache']}"
            without = ("largest_error",)
            steps, alone = (
                [{key: value for key, value in each.items() if key not in without} for each in row[name]]
                for name in ("steps", "steps_alone")
            )
            assert steps == alone, where
            assert row["error"] < 1e-4, where
            assert all(each["num_reused"] for each in steps), where
            for each, single in zip(row["steps"], row["steps_alone"], strict=True):
                assert each["largest_error"] == pytest.approx(single["largest_error"], rel=1e-3), where
