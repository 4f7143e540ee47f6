"""Faults of processes on several GPUs, where the others wait in a call of NCCL's that nobody answers.

`pytest -s` shows how long each run went on after its fault.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from several_processes import end, start, wait_for

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
GENERATE = (
    *("generate", "a red circle moving left", "--device", "cuda", "--format", "npy", "--num-gpus", "2"),
    # The processes share the sequence, so that every layer waits for the other one.
    *("--height", "64", "--width", "96", "--num-frames", "5", "--num-inference-steps", "3", "--ulysses-degree", "2"),
)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [("kill", 1, "was killed by SIGKILL"), ("stop", 1, "has been stopped for"), ("interrupt", 130, "interrupted")],
)
def test_a_fault_ends_both_with_one_error(fault: str, code: int, said: str, tmp_path: Path) -> None:
    plan = {"faults": [{"rank": 1, "stage": "denoise", "step": 1, "fault": fault}]}
    running = start(tmp_path, *GENERATE, plan=plan, warm=False)
    try:
        wait_for(tmp_path / "happened", running)
        began = time.monotonic()
        result = running.finish()
        print(f"{fault}: ended {time.monotonic() - began:.1f} s after the fault")
        assert running.remaining() == []
    finally:
        end(running)
    assert result.code == code, result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert errors[0].startswith("error: rank 1")
    assert said in errors[0]
    assert "Traceback" not in result.err
