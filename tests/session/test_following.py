"""Ranks that follow rank 0's requests, in a script of a user's own; alone, the same script is one process."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import process_environment
from warm_python import run_python

SCRIPT = Path(__file__).with_name("follow_script.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_follow_until_they_are_told_to_stop(num_processes: int) -> None:
    """Pictures, a request that no rank can make, requests that are cancelled, and a fault of the server's own."""
    environment = process_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    finished = run_python(*(launcher if num_processes > 1 else ()), SCRIPT, env=environment, max_ranks=num_processes)
    assert finished.returncode == 0, finished.stderr
    said = sorted(line for line in finished.stdout.splitlines() if line.startswith("rank "))
    first, *others = [line.partition(": ")[2] for line in said]
    assert others == ["stopped"] * (num_processes - 1)
    before, kept, num_decoded, *failures, after = first.split()
    assert max(int(before), int(kept), int(after)) <= 1
    # Before and after the one that was not cancelled.
    assert num_decoded == "2"
    assert failures == ["RequestError", "Cancelled", "KeyError"]


@pytest.mark.slow
def test_the_documented_example_serves_requests_on_two_processes(tmp_path: Path) -> None:
    """docs/scaling.md, copied as it stands and started as it says, with the public names alone."""
    (example,) = [block for block in python_blocks(ROOT / "docs/scaling.md") if "follow(pipeline" in block]
    (tmp_path / "serve.py").write_text(example)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [sys.executable, *launcher, "serve.py", "a red circle", "a blue star"],
        cwd=tmp_path,
        env=process_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["0.png", "1.png"]
    imported = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imported} == {"diffusion_runtime"}


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)
