"""Two real processes that train together: one set of weights, the gradient of the joint batch, one clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from quality.ranks_worker import squared_error_gradients
from warm_python import run_python

from scripts.train_embedded.ranks import Ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_take_the_same_steps_on_different_data(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = run_python(
        *launcher, ROOT / "tests/quality/ranks_worker.py", tmp_path, env=environment, cwd=ROOT, max_ranks=2
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))

    joint = squared_error_gradients(slice(0, 4), Ranks(0, 1, "cpu"))
    assert len(joint) == len(first["gradients"])
    for expected, one, other in zip(joint, first["gradients"], second["gradients"], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-4)
    half = squared_error_gradients(slice(0, 2), Ranks(0, 1, "cpu"))
    assert any(not torch.allclose(one, own, atol=1e-6, rtol=1e-4) for one, own in zip(joint, half, strict=True))

    assert (first["count"], first["agreed"], second["agreed"]) == (2, 0.25, 0.25)
    assert first["errors"] != second["errors"]
    assert all(torch.equal(one, other) for one, other in zip(first["weights"], second["weights"], strict=True))
    assert (first["apart"], second["apart"]) == (0.0, 0.0)
    assert (first["apart_before"], second["apart_before"]) == (1.0, 1.0)
    start, end = first["before"], first["weights"]
    assert sum(not torch.equal(one, other) for one, other in zip(start, end, strict=False)) > 0.9 * len(start)

    # Causal training: other data, noise and clocks, the same steps and weights, and one checkpoint.
    (steps, own), (others_steps, others) = first["causal"], second["causal"]
    assert steps == others_steps > 0
    assert all(torch.equal(one, other) for one, other in zip(own, others, strict=True))
    assert [path.name for path in sorted(tmp_path.glob("causal*"))] == ["causal0"]
