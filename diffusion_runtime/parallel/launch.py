"""Start N ranks of this program on this machine with torch's elastic launcher (as torchrun does), and report how they
ended."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from diffusion_runtime.parallel.failure import RankFailure, read_growing_file
from diffusion_runtime.parallel.process_info import LAUNCHED_VARIABLE, TERMINATED
from diffusion_runtime.parallel.signs_of_life import children_of, is_alive

# torch's own messages about ranks that fail; this program has better ones.
_ELASTIC_LOGGER = "torch.distributed.elastic"
# torch's C++ code logs to stderr what it also raises.
_QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
# What an interrupted rank has to end in order, of the 3 s in which all are gone: then it is killed, as one in a call
# into CUDA or NCCL hears no signal until that returns. torch's own limit is 30 s.
_INTERRUPTED_SECONDS = 2.5
# How long to wait for killed processes to be gone.
_KILL_SECONDS = 5.0
# Sent to this process by a check that failed, and what the ranks are ended with then: they have nothing to unwind yet.
_CHECK_FAILED = signal.SIGUSR1
_KILL = signal.SIGKILL
# How much of a rank's stderr is quoted when it ends without a reason.
_NUM_LAST_LINES = 6
_MAX_LAST_BYTES = 4096
_KILLED = (
    "was killed by SIGKILL: by another program, or by the system because memory ran out (fewer processes, a smaller "
    "size or dtype bfloat16 need less)"
)


class Interrupted(Exception):
    """A signal ended the run. is_reported: rank 0 has printed what was finished. growing_file: what it was writing
    while that was made, which stays."""

    def __init__(self, *, is_reported: bool, growing_file: str | None = None) -> None:
        super().__init__("interrupted")
        self.is_reported = is_reported
        self.growing_file = growing_file


def this_program() -> tuple[str, ...]:
    """Return the arguments after the interpreter that start this program again: a module or a script."""
    is_module = sys.modules["__main__"].__spec__ is not None
    # An installed command is a script too, but on some systems not one that Python can read.
    return (sys.argv[0],) if sys.argv[0].endswith(".py") and not is_module else ("-m", "diffusion_runtime")


def shutdown_limit(config_type: type) -> dict[str, Any]:
    """Return the argument of torch's LaunchConfig that limits how long an interrupted rank has to end. torch 2.11 has
    none: there a rank that hears no signal is killed after torch's own 30 s."""
    named = {field.name for field in dataclasses.fields(config_type)}
    return {"shutdown_timeout": _INTERRUPTED_SECONDS} if "shutdown_timeout" in named else {}


def launch(
    program: Sequence[str],
    num_processes: int,
    *,
    on_cpu: bool,
    verbose: bool,
    end_at_once: Callable[[bool], None],
    check: Callable[[], None],
) -> RankFailure | None:
    """Run a Python program in `num_processes` processes until all have ended; None when all succeeded.

    A rank that fails ends the others. on_cpu: the ranks share the CPU's cores. verbose: show torch's messages about its
    ranks, and the stderr of ranks other than 0.

    end_at_once: called on a second signal, after the ranks have been killed; its argument is whether one of them had
    reported the interruption.

    check: checks the whole run in a thread while the ranks import, which takes them seconds. Where it
    raises, they are killed, and `launch` raises the same once they have ended.

    Raises Interrupted after SIGINT, SIGTERM or SIGHUP, once all processes have ended.
    """
    with tempfile.TemporaryDirectory(prefix="diffusion-runtime-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=Path(folder).name,
            # A rendezvous store of the launcher's own on a free port: two runs never share one.
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            # Rank 0 writes to the terminal. The stderr of the others is kept: it may show why one of them died.
            logs_specs=DefaultLogsSpecs(
                log_dir=folder, redirects={} if verbose else dict.fromkeys(range(1, num_processes), Std.ERR)
            ),
            **shutdown_limit(LaunchConfig),
            # Not the signals that end a run: `_signals` handles those.
            signals_to_handle="SIGUSR2",
        )
        started = elastic_launch(config, sys.executable)
        others = frozenset(children_of(os.getpid()))

        def kill() -> None:
            _kill_ranks(others)
            is_reported = any(record.is_reported for record in _records(folder))
            shutil.rmtree(folder, ignore_errors=True)
            end_at_once(is_reported)

        checked = _CheckBeside(check)
        try:
            with (
                _environment(_variables(num_processes, on_cpu=on_cpu, verbose=verbose)),
                _quiet(verbose),
                _signals(kill),
                checked.running(),
            ):
                started(*program)
        except ChildFailedError as error:
            cause = _cause(error.failures, _records(folder), folder)
            if not cause.is_reported:
                # A rank may fail of what the check finds; the check reports it without a rank.
                checked.raise_error()
            return dataclasses.replace(cause, growing_file=read_growing_file(folder))
        except (SignalException, KeyboardInterrupt) as error:
            if isinstance(error, SignalException) and error.sigval == _KILL:
                _kill_ranks(others)
                checked.raise_error()
            is_reported = any(record.is_reported for record in _records(folder))
            raise Interrupted(is_reported=is_reported, growing_file=read_growing_file(folder)) from error
    return None


class _CheckBeside:
    """A check in a thread next to torch's launcher, which only the main thread can run."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="check of the run", daemon=True)
        self._is_over = False

    def _run(self) -> None:
        try:
            self._check()
        except BaseException as error:
            self._error = error
            if not self._is_over:
                # To the main thread, so that it does not sleep on.
                signal.pthread_kill(cast(int, threading.main_thread().ident), _CHECK_FAILED)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it; where it fails within the block, the main thread raises SignalException(_KILL), with which torch's
        launcher kills its ranks. The check is over when the block is, unless an exception leaves it."""

        def handle(*_: object) -> None:
            raise SignalException("the check of the run failed", _KILL)

        before = signal.signal(_CHECK_FAILED, handle)
        try:
            self._thread.start()
            yield
            self._thread.join()
        finally:
            self._is_over = True
            # One that fails yet may be about to send the signal, whose default ends this process.
            signal.signal(_CHECK_FAILED, signal.SIG_IGN if self._thread.is_alive() else before)

    def raise_error(self) -> None:
        """Wait for the check to end and raise its error, if any."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _variables(num_processes: int, *, on_cpu: bool, verbose: bool) -> dict[str, str]:
    """Environment variables for the ranks, unless the user set them."""
    variables = {LAUNCHED_VARIABLE: str(os.getpid())}
    if not verbose:
        variables |= _QUIET_TORCH
    if on_cpu:
        # Each rank would start one thread per core, and all would compete for the cores.
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_processes))
    return {name: value for name, value in variables.items() if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process's environment, which the launched ranks inherit, while the block runs."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]


@contextmanager
def _signals(on_second: Callable[[], None]) -> Iterator[None]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP all reach the ranks as SIGINT. SIGTERM then always means that
    another rank has failed. A SIGHUP that is ignored, as under nohup, stays so."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {number: handler for number in numbers if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    num_signals = 0

    def handle(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            on_second()
        # What torch's launcher raises for a signal; the signal is passed on to the ranks.
        raise SignalException("interrupted", signal.SIGINT)

    for number in kept:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """While the block runs, torch's launcher logs nothing, unless `verbose`."""
    logger = logging.getLogger(_ELASTIC_LOGGER)
    was_propagating, handlers = logger.propagate, logger.handlers
    if not verbose:
        logger.propagate, logger.handlers = False, [logging.NullHandler()]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = was_propagating, handlers


def _kill_ranks(others: frozenset[int]) -> None:
    """Kill the child processes that torch's launcher started. others: those that were there before it."""
    ranks = set(children_of(os.getpid())) - others
    for process in ranks:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    while any(is_alive(process) for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)


def _records(folder: str) -> list[RankFailure]:
    """Return the failure records that ranks have written, by rank."""
    found = [RankFailure.read(path) for path in sorted(Path(folder).glob("**/error.json"))]
    return [record for record in found if record is not None]


def _stderr_end(folder: str, rank: int) -> str:
    """Return the end of a rank's stderr, where that was kept."""
    lines: list[str] = []
    for path in Path(folder).glob(f"**/{rank}/stderr.log"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_LAST_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(f"  {line}" for line in lines[-_NUM_LAST_LINES:])


def _cause(failures: Mapping[int, ProcessFailure], records: Sequence[RankFailure], folder: str) -> RankFailure:
    """Return the root cause among several failures: one with a record is preferred to one that a signal ended."""
    # After a failure the launcher ends the other ranks with SIGTERM, and with SIGKILL those that do not react.
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    killed = [failure for failure in failures.values() if failure.exitcode < 0 and failure.signal_name() != "SIGTERM"]
    if records:
        return min(records, key=lambda record: record.rank)
    chosen = first if first in killed or not killed else killed[0]
    rank, process = chosen.local_rank, chosen.pid
    if chosen.exitcode < 0:
        name = chosen.signal_name()
        what = _KILLED if name == "SIGKILL" else f"crashed with {name}"
    elif chosen.exitcode == TERMINATED:
        what = "was ended by SIGTERM, which another program sent"
    else:
        stderr_end = _stderr_end(folder, rank)
        what = f"ended with exit code {chosen.exitcode}" + (
            f"; its stderr ends with:\n{stderr_end}"
            if stderr_end
            else " without a recorded reason; see its stderr above"
        )
    return RankFailure(rank, "ProcessLostError", f"rank {rank} (process {process}) {what}")
