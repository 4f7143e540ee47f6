"""The same exchanges on several GPUs, over NCCL: streams and buffers are used as they must be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel.exchange_cases import WORLDS
from parallel.test_exchanges import run_worlds

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


def test_gpus_together_equal_one_alone(tmp_path: Path) -> None:
    results = run_worlds(tmp_path, torch.cuda.device_count())
    assert 2 in results
    for world, of_world in results.items():
        for of_rank in of_world:
            assert len(of_rank["measured"]) > 10
            for name, measured in of_rank["measured"].items():
                if "error_alone" in measured:
                    factor = 1.3 if WORLDS[world][name].ring > 1 else 1.05
                    assert measured["error"] <= factor * measured["error_alone"], (world, name)
                else:
                    assert measured["error"] < 5e-5, (world, name)
