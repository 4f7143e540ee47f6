"""Triton kernels compile for a GPU that this machine does not have; tests marked `gpu` say what they compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper() -> None:
    tests = Path(__file__).parents[1]
    paths = (tests.parent, tests, tests / "kernels")
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_gpus.py")), "90"],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["failed"] == {}
    # A new kernel needs a call in compile_for_gpus.py.
    assert found["missing"] == []
    assert found["compiled"]
