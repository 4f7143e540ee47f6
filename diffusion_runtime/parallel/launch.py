"""Start N processes of this program on this machine with torch's elastic launcher, and say how they ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.process_info import LAUNCHED_VARIABLE
from diffusion_runtime.parallel.process_state import children_of, is_alive

# torch's own words about processes that fail; this program has better ones.
_ELASTIC_LOGGER = "torch.distributed.elastic"
# C++ code of torch says on standard error whatever it also raises.
_QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
# How long processes that were killed may take to be gone.
_KILL_SECONDS = 5.0
# Of what a process has said on standard error when it ends without a reason.
_NUM_LAST_LINES = 6
_MAX_LAST_BYTES = 4096
_KILLED = (
    "was killed by SIGKILL: somebody killed it, or the system ran out of memory (fewer processes, a smaller size or "
    "dtype bfloat16 need less)"
)


class Interrupted(Exception):
    """A signal ended the run. is_reported: the first process has told the user what was finished."""

    def __init__(self, *, is_reported: bool) -> None:
        super().__init__("interrupted")
        self.is_reported = is_reported


def this_program() -> tuple[str, ...]:
    """What follows the interpreter in the command line that starts this program again: a module or a script."""
    is_module = sys.modules["__main__"].__spec__ is not None
    # An installed command is a script too, but not on every system one that Python can read.
    return (sys.argv[0],) if sys.argv[0].endswith(".py") and not is_module else ("-m", "diffusion_runtime")


def launch(
    program: Sequence[str], num_processes: int, *, on_cpu: bool, verbose: bool, end_at_once: Callable[[bool], None]
) -> RankFailure | None:
    """Run a Python program in `num_processes` processes until all have ended; None when all succeeded.

    A process that fails ends the others. on_cpu: the processes share the CPU's cores. verbose: what torch says about
    its processes is shown, and what others than the first say on standard error.

    end_at_once: called for a second signal, when the processes have been killed; told whether one of them has said that
    the run was interrupted.

    Raises Interrupted after SIGINT, SIGTERM or SIGHUP, once all processes have ended.
    """
    with tempfile.TemporaryDirectory(prefix="diffusion-runtime-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=Path(folder).name,
            # A store of the launcher's own on a free port: two runs never meet.
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            # The first process speaks to the terminal. What another one says, though it should not, tells why it died.
            logs_specs=DefaultLogsSpecs(
                log_dir=folder, redirects={} if verbose else dict.fromkeys(range(1, num_processes), Std.ERR)
            ),
            # Not those that end a run: `_signals` has them.
            signals_to_handle="SIGUSR2",
        )
        started = elastic_launch(config, sys.executable)

        def kill() -> None:
            _kill_children()
            is_reported = any(record.is_reported for record in _records(folder))
            shutil.rmtree(folder, ignore_errors=True)
            end_at_once(is_reported)

        try:
            with (
                _environment(_variables(num_processes, on_cpu=on_cpu, verbose=verbose)),
                _quiet(verbose),
                _signals(kill),
            ):
                started(*program)
        except ChildFailedError as error:
            return _cause(error.failures, _records(folder), folder)
        except (SignalException, KeyboardInterrupt) as error:
            raise Interrupted(is_reported=any(record.is_reported for record in _records(folder))) from error
    return None


def _variables(num_processes: int, *, on_cpu: bool, verbose: bool) -> dict[str, str]:
    """What the processes find in their environment, unless the user set it."""
    variables = {LAUNCHED_VARIABLE: str(os.getpid())}
    if not verbose:
        variables |= _QUIET_TORCH
    if on_cpu:
        # Each process would start a thread a core, and all would wait for each other.
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_processes))
    return {name: value for name, value in variables.items() if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The launcher's processes inherit its environment; nothing else of this process reads it meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]


@contextmanager
def _signals(on_second: Callable[[], None]) -> Iterator[None]:
    """While the block runs every polite signal reaches the processes as SIGINT, so that SIGTERM means to them that
    another process has failed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {number: signal.getsignal(number) for number in numbers}
    num_signals = 0

    def handle(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            on_second()
        # What torch's launcher raises for a signal of its own: it passes this one on to the processes.
        raise SignalException("interrupted", signal.SIGINT)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """While the block runs torch's launcher says nothing, unless `verbose`."""
    logger = logging.getLogger(_ELASTIC_LOGGER)
    was_propagating, handlers = logger.propagate, logger.handlers
    if not verbose:
        logger.propagate, logger.handlers = False, [logging.NullHandler()]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = was_propagating, handlers


def _kill_children() -> None:
    children = children_of(os.getpid())
    for process in children:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    while any(is_alive(process) for process in children) and time.monotonic() < deadline:
        time.sleep(0.01)


def _records(folder: str) -> list[RankFailure]:
    """What processes have written about why they ended, by rank."""
    found = [RankFailure.read(path) for path in sorted(Path(folder).glob("**/error.json"))]
    return [record for record in found if record is not None]


def _last_words(folder: str, rank: int) -> str:
    """The end of what a process has said on standard error, where that was kept."""
    lines: list[str] = []
    for path in Path(folder).glob(f"**/{rank}/stderr.log"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_LAST_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    return "\n".join(f"  {line}" for line in lines[-_NUM_LAST_LINES:])


def _cause(failures: Mapping[int, ProcessFailure], records: Sequence[RankFailure], folder: str) -> RankFailure:
    """The one reason among several: a process says why it gives up, a signal does not."""
    # The launcher ends processes with SIGTERM, and with SIGKILL those that do not listen, after another one has failed.
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    killed = [failure for failure in failures.values() if failure.exitcode < 0 and failure.signal_name() != "SIGTERM"]
    if records:
        return min(records, key=lambda record: record.rank)
    chosen = first if first in killed or not killed else killed[0]
    rank, process = chosen.local_rank, chosen.pid
    if chosen.exitcode < 0:
        name = chosen.signal_name()
        what = _KILLED if name == "SIGKILL" else f"crashed with {name}"
    else:
        last_words = _last_words(folder, rank)
        what = f"ended with exit code {chosen.exitcode} " + (
            f"and said last:\n{last_words}" if last_words else "before it could say why; see above for its last words"
        )
    return RankFailure(rank, "ProcessLostError", f"rank {rank} (process {process}) {what}")
