"""Several processes that run the command together, for tests: started by `--num-gpus` or torchrun, with faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli_support import Result, process_environment
from warm_python import WarmProcess, start_python

PROGRAM = Path(__file__).with_name("faulty_program.py")
GENERATE = (
    *("generate", "a red circle moving left", "--model-path", "shapes", "--device", "cpu", "--format", "npy"),
    *("--height", "64", "--width", "96", "--num-frames", "5", "--num-inference-steps", "3"),
    # Processes with a branch each compute it apart; in one batch with the other one it is rounded otherwise. UniPC
    # extrapolates, which makes roundings larger.
    *("--guidance-mode", "two_pass", "--sampler", "flow_match_euler"),
)


@dataclass(frozen=True)
class Running:
    """A command that was started as `faulty_program.py` in `folder`, whose plan it follows."""

    process: subprocess.Popen[str] | WarmProcess
    program: Path

    def finish(self, timeout: float = 600) -> Result:
        out, err = self.process.communicate(timeout=timeout)
        return Result(self.process.returncode, out, err)

    def remaining(self) -> list[int]:
        """Processes of this run that are still there, after a moment to be gone."""
        deadline = time.monotonic() + 60
        while (found := _processes_of(self.program)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


def start(
    folder: Path,
    *arguments: object,
    plan: dict[str, Any] | None = None,
    num_torchrun: int | None = None,
    warm: bool = True,
) -> Running:
    """Start a command line in `folder`. num_torchrun: processes that torchrun starts, None for one process, whose
    `--num-gpus` may start more. warm: not by torchrun, the processes are forked from a warm interpreter."""
    folder.mkdir(parents=True, exist_ok=True)
    program = Path(shutil.copy(PROGRAM, folder / PROGRAM.name))
    (folder / "plan.json").write_text(json.dumps(plan or {}))
    if warm and num_torchrun is None:
        warm_process = start_python(program, *arguments, cwd=folder, env=process_environment(), max_ranks=4)
        return Running(warm_process, program)
    launcher: Sequence[str] = ()
    if num_torchrun is not None:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_torchrun))
    process = subprocess.Popen(
        [sys.executable, *launcher, str(program), *map(str, arguments)],
        cwd=folder,
        env=process_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Running(process, program)


def run(folder: Path, *arguments: object, plan: dict[str, Any] | None = None) -> Result:
    running = start(folder, *arguments, plan=plan)
    try:
        return running.finish()
    finally:
        end(running)


def end(running: Running) -> None:
    """Whatever happens in a test, nothing of it runs on."""
    for process in _processes_of(running.program):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    running.process.communicate()


def finish(running: Running) -> Result:
    """What a run that must end by itself left; fails when processes do."""
    try:
        result = running.finish()
        assert running.remaining() == []
        return result
    finally:
        end(running)


def wait_for(path: Path, running: Running) -> None:
    """Until a process of the run has made `path`. Fails when the run has ended without."""
    while not path.exists():
        assert running.process.poll() is None, running.process.communicate()
        time.sleep(0.05)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _processes_of(program: Path) -> list[int]:
    """Processes that work in the folder of this very script, whoever their parent is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                folder = Path(os.readlink(entry / "cwd"))
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if folder == program.parent and not is_zombie and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found
