"""A server as users start it, for the tests of serving: one process, its engine, and a client without retries."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cli_support import process_environment

from diffusion_runtime.serving.engine_process import CONFIG_FILE, ENGINE

# A small clip of the embedded model: 0.3 s of a core.
SMALL = {"size": "64x64", "num_frames": 5, "num_inference_steps": 2}
# A bound on hangs, not on speed.
SECONDS = 300.0
# Flags of every server, of pytest's --serve-with.
SERVE_WITH: list[str] = []
# Of the server that tests share.
ADMIN = {"authorization": "Bearer admin-1"}
ORIGIN = "https://page.example"


@dataclass
class RunningServer:
    """One process of `serve`. logs: its records so far."""

    storage: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = None
    logs: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""

    def start(self) -> None:
        words = ("serve", "--port", "0", "--storage", str(self.storage), "--log-format", "json")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diffusion_runtime", *words, *SERVE_WITH, *self.arguments],
            env=process_environment(HF_HUB_OFFLINE="1"),
            stderr=subprocess.PIPE,
            text=True,
        )
        self.logs.clear()
        listening = threading.Event()
        threading.Thread(target=self._read, args=(self.process, listening), daemon=True).start()
        assert listening.wait(SECONDS), self.logs

    def _read(self, process: subprocess.Popen[str], listening: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    record = {"message": line}
                self.logs.append(record)
                if "address" in record:
                    self.address = record["address"]
                    listening.set()
        listening.set()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=SECONDS, trust_env=False, **options)

    def wait_until_ready(self) -> None:
        with self.client() as http:
            wait_for(lambda: http.get("/health").status_code == 200)

    @property
    def is_on_ray(self) -> bool:
        return "--ray" in SERVE_WITH

    def engine_pids(self) -> list[int]:
        """The children of the server; on a Ray cluster of this machine the engines of its storage, which are not."""
        assert self.process is not None
        if self.is_on_ray:
            return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._is_engine(pid)]
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(each) for each in children]

    def _is_engine(self, pid: int) -> bool:
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if ENGINE in words:
                given = json.loads((Path(words[words.index(ENGINE) + 1]) / CONFIG_FILE).read_text())
                return bool(given["storage"] == str(self.storage))
        return False

    def engine_pid(self) -> int:
        """The first child of the server, the only one where it has one replica."""
        return self.engine_pids()[0]

    def rank_pids(self) -> list[int]:
        """The processes of an engine of several: children of a launcher, or one in each bundle of a Ray cluster."""
        if self.is_on_ray:
            return sorted(self.engine_pids())
        launcher = self.engine_pid()
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return [int(pid) for pid in children]

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(SECONDS)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill(signal.SIGTERM)


@contextlib.contextmanager
def running_server(storage: Path, *arguments: str, is_ready: bool = True) -> Iterator[RunningServer]:
    """Context manager: a server with the embedded model."""
    server = RunningServer(storage, (*arguments, "--no-warmup"))
    server.start()
    try:
        if is_ready:
            server.wait_until_ready()
        yield server
    finally:
        server.stop()


def wait_for(condition: Any, seconds: float = SECONDS) -> Any:
    """Return what a condition gives once it is true."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.05)


def finished(http: httpx.Client, video_id: str) -> dict[str, Any]:
    """Return a video once it is over, having seen that its progress never falls but while it waits."""
    seen = -1
    while True:
        video: dict[str, Any] = http.get(f"/v1/videos/{video_id}").json()
        if video["status"] != "queued":
            assert video["progress"] >= seen or video["status"] == "failed", (seen, video)
            seen = video["progress"]
        if video["status"] in ("completed", "failed"):
            return video
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
