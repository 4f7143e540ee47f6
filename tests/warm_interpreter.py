"""The warm interpreter of warm_python.py, as a program: imports what takes long, then forks a program per request."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Third-party modules that a generation imports; one that is not installed is left to whoever needs it.
PRELOADED = (
    "PIL.Image PIL.PngImagePlugin numpy rich.console rich.markup rich.table safetensors.torch tokenizers typer yaml",
    "pydantic.fields pydantic.json_schema pydantic.type_adapter pydantic.types",
    "torch torch._dynamo torch.distributed torch.distributed.launcher.api torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.agent.server.local_elastic_agent torch.distributed.elastic.rendezvous.registry",
    "diffusers diffusers.models.autoencoders.autoencoder_kl diffusers.models.autoencoders.autoencoder_kl_wan",
    "diffusers.models.autoencoders.autoencoder_kl_hunyuan_video diffusers.models.autoencoders.autoencoder_kl_ltx2",
    "diffusers.schedulers.scheduling_unipc_multistep diffusers.schedulers.scheduling_flow_match_euler_discrete",
    "transformers transformers.models.umt5.modeling_umt5 transformers.models.llama.modeling_llama",
    "transformers.models.clip.modeling_clip transformers.models.t5.tokenization_t5",
)
_MAX_REQUEST = 1 << 20
# Bytes of an answer: a number in decimal.
_ANSWER = 16


def serve(requests: socket.socket) -> NoReturn:
    """Fork a program per request until nobody asks any more."""
    for name in " ".join(PRELOADED).split():
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    assert not [name for name in sys.modules if name.startswith("diffusion_runtime")]
    # What no program changes need not be looked at by its garbage collector, which would copy it.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 4)
        if not message:
            os._exit(0)
        if not os.fork():
            requests.close()
            _run_program(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_program(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Start the program, wait for it, and tell its exit code."""
    reply = socket.socket(fileno=descriptors[3])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        reply.send(f"{pid:<{_ANSWER}}".encode())
        _, status = os.waitpid(pid, 0)
        reply.send(f"{os.waitstatus_to_exitcode(status):<{_ANSWER}}".encode())
        os._exit(0)
    reply.close()
    _take_streams(descriptors[:3])
    for _ in range(request["max_ranks"]):
        Rank.fork_one()
    if request["max_ranks"]:
        launcher = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler")
        launcher.subprocess_handler.Popen = Rank
    _run(request["words"], request["cwd"], request["env"])


def _run(words: Sequence[str], cwd: str, env: Mapping[str, str]) -> NoReturn:
    """Run a program and end this process with its exit code, as Python does but for freeing memory, which takes 1.7 s
    of CPU time."""
    code = 0
    try:
        _run_main(words, cwd, env)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
            code = 120
    os._exit(code)


def _run_main(words: Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
    atexit._clear()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if words[0] == "-u":
        # As torchrun starts its ranks.
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    is_module, is_code = words[0] == "-m", words[0] == "-c"
    sys.argv = list(words[1:] if is_module else words)
    sys.path[0] = "" if is_code else cwd if is_module else str(Path(words[0]).parent)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif is_code:
        sys.argv.pop(1)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[1], main.__dict__)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _take_streams(descriptors: Sequence[int]) -> None:
    """Standard streams as Python makes them at its start, in the locale of the warm interpreter."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", -1, encoding, errors, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115


class Rank:
    """What torch's launcher takes for the Popen of a rank: a child of the launcher that was forked before the launcher
    did anything, and has waited for its command line since."""

    waiting: list[tuple[int, socket.socket]] = []  # noqa: RUF012

    @classmethod
    def fork_one(cls) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():
            theirs.close()
            cls.waiting.append((pid, ours))
        else:
            ours.close()
            for _, other in cls.waiting:
                other.close()
            _be_rank(theirs)

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        assert start_new_session
        self.args, self.returncode = args, None
        self.pid, orders = Rank.waiting.pop(0)
        request = {"words": args[1:], "cwd": os.getcwd(), "env": dict(env)}
        streams = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        socket.send_fds(orders, [json.dumps(request).encode()], streams)
        orders.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            time.sleep(0.02)
        return code


def _be_rank(orders: socket.socket) -> NoReturn:
    # A signal for the launcher's whole group is none for a rank that has not started.
    os.setsid()
    message, streams, _, _ = socket.recv_fds(orders, _MAX_REQUEST, 2)
    orders.close()
    if not message:
        os._exit(0)
    for place, descriptor in enumerate(streams, start=1):
        os.dup2(descriptor, place)
        os.close(descriptor)
    request = json.loads(message)
    _run(request["words"], request["cwd"], request["env"])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
