"""The engine's side of its connection to the server: messages in and out, progress of a batch, cancelled jobs."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import Cancelled
from diffusion_runtime.serving.engines import BEAT_SECONDS, versions
from diffusion_runtime.serving.pictures import encoded
from diffusion_runtime.untrusted.json_text import parse_json

if TYPE_CHECKING:
    from diffusion_runtime.core.progress import Progress

SOCKET_FILE = "socket"


class Channel:
    """The connection to the server. The thread that reads ends the process when the server is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(folder / SOCKET_FILE))
        self._lock = threading.Lock()
        self.runs: queue.Queue[dict[str, Any]] = queue.Queue()
        self.questions: queue.Queue[dict[str, Any]] = queue.Queue()
        # Prompts and forks of the streams that run.
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.cancelled: set[str] = set()
        self.send("hello", versions=versions())
        for target, name in ((self._read, "server connection"), (self._beat, "signs of life")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def send(self, kind: str, /, **values: Any) -> None:
        line = json.dumps({"type": kind, **values}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self.send("alive")

    def _read(self) -> None:
        try:
            # A server that was killed with messages unread resets the connection: an OSError and no end of file.
            with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
                for line in lines:
                    message = parse_json(line)
                    if message["type"] in ("run", "load"):
                        self.runs.put(message)
                    elif message["type"] == "cancel":
                        self.cancelled.add(message["job"])
                    elif message["type"] in ("prompt", "fork"):
                        self.commands.put(message)
                    else:
                        self.questions.put(message)
        finally:
            # A server that was killed leaves its folder behind. Nobody waits for what this process computes, and one
            # call of torch may take minutes.
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(0)


class BatchProgress:
    """Progress of one batch, as an on_progress: reported to the server, and ended for jobs that were cancelled.
    wanted: indices of the works that nobody cancelled."""

    def __init__(self, channel: Channel, works: Sequence[Mapping[str, Any]]) -> None:
        self._channel = channel
        self._works = works
        self.wanted = list(range(len(works)))

    def __call__(self, progress: Progress) -> None:
        indices = self.wanted if progress.request_index is None else [progress.request_index]
        jobs = list(dict.fromkeys(self._works[index]["job"] for index in indices))
        values = {"stage": progress.stage, "step": progress.step, "num_steps": progress.num_steps}
        self._channel.send("progress", jobs=jobs, **values)
        left_out = self.leave_out_cancelled()
        if left_out:
            raise Cancelled(left_out)

    def leave_out_cancelled(self) -> list[int]:
        """Return the indices of works that were cancelled since the last call."""
        gone = [index for index in self.wanted if self._works[index]["job"] in self._channel.cancelled]
        self.wanted = [index for index in self.wanted if index not in gone]
        for index in gone:
            self._channel.send("cancelled", job=self._works[index]["job"])
        return gone

    def profiled(self, trace_id: str, error: str | None) -> None:
        """Tell the server that a trace was written, or why not."""
        self._channel.send("profiled", id=trace_id, error=error)

    def preview(self, step: int, num_steps: int, pictures: Sequence[Any]) -> None:
        """Send a picture of each request's clean estimate, as ServedModel.generate hands it over."""
        for index in self.wanted:
            work = self._works[index]
            png = base64.b64encode(encoded(pictures[index], "PNG")).decode()
            values = {"index": work["index"], "step": step, "num_steps": num_steps, "png": png}
            self._channel.send("preview", job=work["job"], **values)
