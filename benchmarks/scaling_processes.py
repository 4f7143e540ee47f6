"""The processes of `scaling_gpu.py`: a team of ranks that runs rows, and another benchmark that is one row."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling_rows import Row

ROOT = Path(__file__).parents[1]


class Failed(Exception):
    """A row has no figure; the reason."""


class Team:
    """Ranks that run rows in order. Their standard error goes to files, which are quoted when one fails."""

    def __init__(self, rows: Sequence[Row], arguments: argparse.Namespace) -> None:
        first, self.folder = rows[0], tempfile.TemporaryDirectory(prefix="scaling_gpu_")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.has_begun = False
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.ranks: list[subprocess.Popen[bytes]] = []
        command = [
            sys.executable,
            "-m",
            "benchmarks.scaling_gpu",
            "--plan",
            arguments.plan,
            "--device",
            arguments.device,
        ]
        command += ["--small"] if arguments.small else []
        command += ["--rank-rows", json.dumps([row.name for row in rows])]
        for rank in range(first.num_processes):
            environment = {
                **os.environ,
                **first.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(first.num_processes),
                "LOCAL_WORLD_SIZE": str(first.num_processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
            }
            if arguments.device == "cpu":
                environment["OMP_NUM_THREADS"] = "1"
            with self.errors_of(rank).open("wb") as errors:
                self.ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=errors,
                        start_new_session=True,
                    )
                )
        threading.Thread(target=self._read, daemon=True).start()

    def errors_of(self, rank: int) -> Path:
        return Path(self.folder.name) / f"{rank}.txt"

    def _read(self) -> None:
        stdout = self.ranks[0].stdout
        assert stdout is not None
        for line in stdout:
            # What a library prints is none of them.
            with contextlib.suppress(ValueError):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def result_of(self, row: Row, seconds: float) -> dict[str, Any]:
        """Wait for a row's result. Raises Failed where a rank ends first, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            failed = [rank for rank, process in enumerate(self.ranks) if process.poll() not in (None, 0)]
            if failed:
                raise Failed(f"rank {failed[0]} ended with {self.ranks[failed[0]].returncode}: {self._quoted()}")
            if time.monotonic() > deadline:
                raise Failed(f"it took more than {seconds:.0f} s; {self._quoted()}")
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if line is None:
                raise Failed(f"rank 0 ended without a result: {self._quoted()}")
            self.has_begun = True
            if line.get("row") == row.name:
                return dict(line["found"])

    def _quoted(self) -> str:
        """The last line of each rank's standard error, once each, that of an exception first."""
        time.sleep(0.5)
        texts = [self.errors_of(rank).read_text(errors="replace").strip() for rank in range(len(self.ranks))]
        last = [text.splitlines()[-1][:400] for text in texts if text]
        return " | ".join(sorted(dict.fromkeys(last), key=lambda line: "Error" not in line)[:3]) or "no rank said why"

    def end(self, seconds: float = 0.0) -> None:
        """Wait for the ranks to end, then kill them with what they started."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self.ranks):
            time.sleep(0.05)
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.folder.cleanup()


def run_program(row: Row, seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run another benchmark and return its document. Raises Failed; what it wrote until then is kept in that case."""
    small = ["--small"] if "replicas_gpu" in row.arguments[0] else ["--device", "cpu", "--seconds", "500"]
    if "torch.distributed.run" in row.arguments[0]:
        small = ["--device", "cpu", "--small"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", *(each.format(output=path) for each in row.arguments)]
        command += small if arguments.small else []
        with (Path(folder) / "errors.txt").open("w+b") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, cwd=ROOT
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()[-3:]
        found = json.loads(path.read_text()) if path.is_file() else {}
        for key in ("schema", "machine"):
            found.pop(key, None)
        if code != 0:
            how = f"took more than {seconds:.0f} s" if code is None else f"ended with {code}"
            found["reason"] = f"{row.arguments[0]} {how}: {' | '.join(said)[-600:]}"
        return found
