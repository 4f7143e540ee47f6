"""A world of processes in a script of a user's own."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from cli_support import process_environment
from warm_python import run_python, start_python

SCRIPT = Path(__file__).with_name("world_script.py")
LEAVING_SCRIPT = Path(__file__).with_name("leaving_script.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_world_holds_several_pipelines_on_one_device() -> None:
    """With different degrees: the same picture."""
    environment = process_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finished = run_python(*launcher, SCRIPT, env=environment, max_ranks=2)
    assert finished.returncode == 0, finished.stderr
    said = sorted(line for line in finished.stdout.splitlines() if line.startswith("rank "))
    assert len(said) == 2
    for rank, line in enumerate(said):
        difference, _, message = line.removeprefix(f"rank {rank}: ").partition("; ")
        assert int(difference) <= 1
        assert message.startswith("device: these processes share a model on cpu already")


def run_without_launcher(what: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of two processes that find each other by their environment alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for rank in range(2):
        environment = {**process_environment(), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        running.append(start_python(LEAVING_SCRIPT, what, cwd=Path.cwd(), env=environment))
    try:
        said = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(running, said, strict=True)]


def test_the_first_process_stays_until_the_others_have_left() -> None:
    """Without a launcher of torch's the board stands in it."""
    assert run_without_launcher("late") == [(0, "left\n", "")] * 2


def test_the_death_of_the_first_process_is_said_by_the_second() -> None:
    (first, _, _), (code, out, _) = run_without_launcher("dies")
    assert first == -signal.SIGKILL
    assert code != 0
    assert out.startswith("rank 0 ")
    assert "gone" in out
