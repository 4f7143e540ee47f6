"""CUDA graphs on two GPUs, over NCCL: replays are eager passes to the bit, by Ulysses, ring, CFG and tensor
parallel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
ROOT = Path(__file__).parents[2]


def test_replays_on_two_gpus_equal_eager_passes(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = ("-m", "benchmarks.cuda_graphs_ranks_gpu", "--repeats", "0", "--output", str(tmp_path / "found.json"))
    done = subprocess.run(
        [sys.executable, *launcher, *script], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["kind"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert set(rows) == {"ulysses", "ring", "cfg", "tensor"}
    for kind, row in rows.items():
        assert row["correct"], kind
        # A third request of a known kind: all but the first pass, of a batch of both branches or of one branch.
        assert row["graphs"]["num_replayed"] == row["graphs"]["num_forwards"] - 1, row
        assert set(row["graphs"]["eager"]) == {"the first of its request"}, row
