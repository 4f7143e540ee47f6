"""A world of processes in a script of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli_support import process_environment

SCRIPT = Path(__file__).with_name("world_script.py")
ROOT = Path(__file__).parents[2]


def test_a_world_holds_several_pipelines_on_one_device() -> None:
    """With different degrees: the same picture."""
    environment = process_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    said = sorted(line for line in finished.stdout.splitlines() if line.startswith("rank "))
    assert len(said) == 2
    for rank, line in enumerate(said):
        difference, _, message = line.removeprefix(f"rank {rank}: ").partition("; ")
        assert int(difference) <= 1
        assert message.startswith("device: these processes share a model on cpu already")
