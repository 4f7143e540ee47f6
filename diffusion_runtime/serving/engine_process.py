"""Handle of an engine process of this machine: starts it, asks it, hands it batches, and notices its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.serving.engines import EngineLost, OnMessage, Refused
from diffusion_runtime.untrusted.json_text import parse_json

# A line is one message; a partial image of 4096 x 4096 is the longest.
_MAX_LINE = 256 * 2**20
# A killed process ends at once, unless a driver holds it.
_REAP_SECONDS = 5.0
CONFIG_FILE, SOCKET_FILE = "config.json", "socket"
ENGINE = "diffusion_runtime.serving.engine"


class LocalEngines:
    """Engines as processes of this machine, among which `engine.take_share` divides it."""

    max_starts = 5

    async def connect(self) -> None:
        """Do nothing: a process needs nothing before it."""

    def engine(self, index: int, given: Mapping[str, Any], on_message: OnMessage) -> EngineProcess:  # noqa: ARG002
        return EngineProcess(given, on_message)

    async def close(self) -> None:
        """Do nothing: the processes have ended."""


class EngineProcess:
    """One engine. given: its `config.json`; its `program` is the module that is run, this package's engine without.
    on_message: called with every message that is no answer to `ask`. environment: added to this process's."""

    def __init__(
        self, given: Mapping[str, Any], on_message: OnMessage, environment: Mapping[str, str] | None = None
    ) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._given = given
        self._on_message = on_message
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._num_questions = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> int:
        """Start the process, pass on its messages until it ends, and return its exit code."""
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        connected = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()
            else:
                connected.set_result((reader, writer))

        # mkdtemp: nobody but this user may connect, or read what the model is.
        with tempfile.TemporaryDirectory(prefix="diffusion-runtime-") as name:
            folder = Path(name)
            publish_text(folder / CONFIG_FILE, json.dumps(self._given))
            listener = await asyncio.start_unix_server(accept, folder / SOCKET_FILE, limit=_MAX_LINE)
            try:
                # A session of its own: Ctrl-C is the server's to handle.
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", self._given.get("program", ENGINE), name),
                    env=self._environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
                ended = asyncio.ensure_future(self._process.wait())
                await asyncio.wait((connected, ended), return_when=asyncio.FIRST_COMPLETED)
                if connected.done():
                    reader, self._writer = connected.result()
                    await self._read(reader)
                return await ended
            finally:
                listener.close()
                self.kill()
                self._lose()
                await self._reap()

    async def _reap(self) -> None:
        """Wait for a process that was killed: asyncio warns of one that ends after its loop."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _REAP_SECONDS)

    def kill(self) -> None:
        """End the process and the ranks it started, at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def release(self) -> None:
        """End the process, which holds the memory of a model."""
        self.kill()

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        """Return the answer to a question: `check` or `explain`. Raises Refused, and EngineLost where the engine ends
        before it answers."""
        self._num_questions += 1
        number, answer = self._num_questions, asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self.send(kind, id=number, work=work)
        try:
            return await answer
        finally:
            self._questions.pop(number, None)

    def send(self, kind: str, /, **values: Any) -> None:
        """Send one message. Raises EngineLost where nobody is there to read it."""
        if self._writer is None or self._writer.is_closing():
            raise EngineLost("the engine has ended")
        self._writer.write(json.dumps({"type": kind, **values}).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                message = parse_json(line)
                if message["type"] != "checked":
                    self._on_message(message)
                    continue
                answer = self._questions.get(message["id"])
                if answer is None or answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(Refused(message["error"]))
                else:
                    answer.set_result(message["answer"])

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(EngineLost("the engine ended"))
