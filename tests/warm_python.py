"""Python programs in processes forked from a warm interpreter, which has imported what takes long.

A generation of a tiny model takes 6 s of CPU time in a process of its own, 5.6 of them for importing torch, diffusers
and transformers. A warm interpreter imports them once per test worker, and nothing of diffusion_runtime. What is forked
from it has streams, signals, a working directory, an environment and an exit code of its own, as a started process has;
where torch's elastic launcher runs in it, its ranks come from the same interpreter.

Environment variables that Python, torch or diffusers read when they are imported have no effect. Tests of those, and
one per mechanism, start a real interpreter.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

INTERPRETER = Path(__file__).with_name("warm_interpreter.py")
# Bytes of an answer: a number in decimal.
_ANSWER = 16


def start_python(
    *words: object, cwd: Path, env: Mapping[str, str], input_text: str = "", max_ranks: int = 0
) -> WarmProcess | subprocess.Popen[str]:
    """`python WORDS`: a script, `-m MODULE` or `-c CODE`, with its arguments.

    max_ranks: how many ranks torch's launcher may start.

    A process of its own where the system has no such forks (tests of Linux's own behaviour are skipped there too).
    """
    if sys.platform == "linux":
        return WarmProcess(list(map(str, words)), cwd, env, input_text, max_ranks)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdin is not None
    process.stdin.write(input_text)
    process.stdin.close()
    process.stdin = None
    return process


def run_python(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input_text: str = "",
    max_ranks: int = 0,
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """`start_python` until it has ended, by default where and with what this process runs."""
    environment = os.environ if env is None else env
    with start_python(
        *words, cwd=cwd or Path.cwd(), env=environment, input_text=input_text, max_ranks=max_ranks
    ) as process:
        out, err = process.communicate(timeout=timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(map(str, words)), process.returncode, out, err)


def run_worker(script: Path, *words: object) -> str:
    """What a program of tests prints, which may fork ranks; fails where it does, with what it said."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (root, root / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(script, *words, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


class WarmProcess:
    """A forked program, with the part of Popen's interface that tests use."""

    def __init__(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str], input_text: str, max_ranks: int
    ) -> None:
        request = {"words": words, "cwd": str(cwd), "env": dict(env), "max_ranks": max_ranks}
        stdin, self._reply, theirs = os.memfd_create("stdin"), *socket.socketpair()
        os.write(stdin, input_text.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        sent = [stdin, their_out, their_err, theirs.detach()]
        socket.send_fds(_warm_interpreter(), [json.dumps(request).encode()], sent)
        for descriptor in sent:
            os.close(descriptor)
        self.stdout: IO[str] = open(out)  # noqa: SIM115
        self.stderr: IO[str] = open(err)  # noqa: SIM115
        self.returncode: int | None = None
        self.pid = int(self._reply.recv(_ANSWER))

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._reply.settimeout(timeout)
            try:
                self.returncode = int(self._reply.recv(_ANSWER))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked program", timeout or 0) from None
            self._reply.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of standard output and standard error, once it has ended."""
        texts = ["", ""]

        def read(place: int, stream: IO[str]) -> None:
            texts[place] = stream.read()

        streams = [stream for stream in (self.stdout, self.stderr) if not stream.closed]
        readers = [threading.Thread(target=read, args=(number, x), daemon=True) for number, x in enumerate(streams)]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else deadline - time.monotonic())
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        for stream in streams:
            stream.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if len(streams) == 1 and streams[0] is self.stderr:
            texts.reverse()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr):
            stream.close()


@functools.cache
def _warm_interpreter() -> socket.socket:
    """Where requests go. The interpreter ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # What RankRunner sets before torch is imported.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        # A process that has asked CUDA's runtime cannot be forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(INTERPRETER), str(theirs.fileno())],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
