"""Run store: a key-value store shared by all ranks (torch's rendezvous store), with heartbeats and the reason the run
ended.

It is kept by torch's launcher, outside the processes that compute, so it outlives them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, shown
from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.process_info import ProcessInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

# A store answers at once, whatever else its process does: it has a thread of its own.
HANDSHAKE_SECONDS = 8.0
RESOLVE_SECONDS = 5.0
_RETRY_SECONDS = 0.2
# Twice the longest pause of a wait, and more.
_SECONDS_TO_READ = 1.0
_ENDED = "ended"
# Poll intervals of a wait in seconds: a quarter longer each time, so that a wait ends a quarter late at most. Doubled
# from 2 ms, a step of 9 ms that rank 0 tells the others of took 20 ms. The longest is how late a follower begins.
_FIRST_PAUSE, _LONGER, _LONGEST_PAUSE = 0.0002, 1.25, 0.02


class RunStore:
    """Texts by key. Every call is quick; waits poll, so that other threads of the process can use the store."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()

    def set(self, name: str, text: str) -> None:
        with self._lock:
            self._store.set(self._prefix + name, text)

    def get(self, names: Sequence[str]) -> list[str]:
        """Return the values of keys that exist."""
        with self._lock:
            return [value.decode() for value in self._store.multi_get([self._prefix + name for name in names])]

    def has(self, *names: str) -> bool:
        """Return True if all keys exist."""
        with self._lock:
            return bool(self._store.check([self._prefix + name for name in names]))

    def count(self, name: str) -> int:
        """Number of calls for `name` so far, this one included."""
        with self._lock:
            return int(self._store.add(self._prefix + name, 1))

    def first(self, name: str, text: str) -> str:
        """Return the value of a key, which is `text` for the first caller."""
        with self._lock:
            return str(self._store.compare_set(self._prefix + name, "", text).decode())

    def wait(self, names: Sequence[str], give_up: Callable[[], bool]) -> bool:
        """Wait until all keys exist; False as soon as `give_up` returns True. `give_up` may raise."""
        pause = _FIRST_PAUSE
        while not self.has(*names):
            if give_up():
                return False
            time.sleep(pause)
            pause = min(_LONGER * pause, _LONGEST_PAUSE)
        return True

    def end(self, failure: RankFailure) -> bool:
        """Record why the run ends. The first record counts: True for the caller that made it."""
        text = failure.to_json()
        return self.first(_ENDED, text) == text

    def ending(self) -> RankFailure | None:
        """Return why the run ends, once it is recorded, or None."""
        return RankFailure.from_json(self.get([_ENDED])[0]) if self.has(_ENDED) else None

    def store(self) -> Store:
        """Open another connection to the same store with its own key prefix, for torch's process groups."""
        return dist.PrefixStore(f"{self._prefix}groups", self._store.clone())  # type: ignore[attr-defined]


def connect(process: ProcessInfo, timeout: timedelta) -> RunStore:
    """Connect to the run store at the address in `process`. A process alone needs no port.

    Raises ConfigError, within seconds, for an address that cannot be resolved, a port that another program holds, a run
    that meets at the same port, and ranks that were given different WORLD_SIZEs; DiffusionRuntimeError when the store
    or the other ranks are not there in time.
    """
    if process.world_size == 1 and not process.port:
        return RunStore(dist.HashStore(), "diffusion_runtime/")  # type: ignore[attr-defined]
    run_store = RunStore(_open(process, timeout), f"diffusion_runtime/{process.attempt}/")
    try:
        _meet(run_store, process, timeout)
    except dist.DistError as error:
        raise DiffusionRuntimeError(
            f"rank {process.rank}: rank 0 has ended, which kept the rendezvous store at {_meeting(process)}; its own "
            "error says why"
        ) from error
    return run_store


def _meet(run_store: RunStore, process: ProcessInfo, timeout: timedelta) -> None:
    """Raises as `connect`, and torch's own error where the store has ended."""
    # Before it counts as joined: no rank goes on with one of another size.
    _agree_on_size(run_store, process)
    if run_store.count(f"joined/{process.rank}") > 1:
        raise ConfigError(
            f"rank {process.rank} was started twice at {_meeting(process)}: another run meets there; take another "
            "MASTER_PORT (torchrun: --master-port, or --standalone)"
        )
    if not _uses_agent_store():
        _wait_for_others(run_store, process, timeout)


def _meeting(process: ProcessInfo) -> str:
    return f"{process.address}:{process.port}"


def _uses_agent_store() -> bool:
    """Tell whether torch's launcher keeps the store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open(process: ProcessInfo, timeout: timedelta) -> Store:
    """Open a connection to torch's store; rank 0 starts it, where no launcher has."""
    _check_address(process)
    is_host = process.is_first and not _uses_agent_store()
    if not is_host:
        _wait_for_port(process, timeout)

    def open_store() -> Store:
        # Without waiting for the others, which torch does for as long as they are allowed to take to start.
        return dist.TCPStore(  # type: ignore[attr-defined]
            process.address,
            process.port,
            process.world_size,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=is_host,
        )

    try:
        store = _within(HANDSHAKE_SECONDS, open_store)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise DiffusionRuntimeError(_no_answer(process, timeout.total_seconds())) from error
        raise ConfigError(
            f"MASTER_PORT {process.port} is in use on {process.address}: is another run started there? "
            "Take another port"
        ) from error
    except dist.DistError as error:
        raise DiffusionRuntimeError(_no_answer(process, timeout.total_seconds())) from error
    if store is None:
        raise ConfigError(
            f"rank {process.rank}: something listens at {_meeting(process)} and is no rendezvous store: another "
            "program holds MASTER_PORT; take another port"
        )
    return store


def _within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return what `function` returns, raise what it raises; None where it takes longer.

    It goes on in a thread then, as nothing ends a wait inside of torch.
    """
    done: list[Callable[[], T]] = []

    def run() -> None:
        try:
            value = function()
        except BaseException as error:  # raised again where it was asked for
            failure = error

            def fail() -> T:
                raise failure

            done.append(fail)
        else:
            done.append(lambda: value)

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0]() if done else None


def _check_address(process: ProcessInfo) -> None:
    """Raises ConfigError for a name that stays unknown: that of a machine which starts may come a moment later."""
    deadline = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            found = _within(RESOLVE_SECONDS, lambda: socket.getaddrinfo(process.address, process.port))
            if found is not None:
                return
            reason = f"no answer after {RESOLVE_SECONDS:.0f} s"
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"rank {process.rank}: MASTER_ADDR {shown(process.address)} cannot be resolved: {reason}; give the "
                "name or the address of the machine of rank 0, as this machine knows it"
            )
        time.sleep(_RETRY_SECONDS)


def _wait_for_port(process: ProcessInfo, timeout: timedelta) -> None:
    """Wait until something listens where the store is to be. Raises DiffusionRuntimeError."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((process.address, process.port), timeout=HANDSHAKE_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise DiffusionRuntimeError(_no_answer(process, timeout.total_seconds())) from error
        time.sleep(_RETRY_SECONDS)


def _agree_on_size(store: RunStore, process: ProcessInfo) -> None:
    """Raises ConfigError where another rank was given another WORLD_SIZE, and ends the run of those that have met."""
    first = store.first("world_size", f"{process.world_size} {process.rank}")
    size, rank = map(int, first.split())
    if size == process.world_size:
        return
    message = (
        f"WORLD_SIZE differs between ranks: rank {rank} has {size}, rank {process.rank} has {process.world_size}, at "
        f"{_meeting(process)}; give every process the same"
    )
    # The others are told by what they wait in: this, or the watchdog once they have met.
    store.end(RankFailure(process.rank, ConfigError.__name__, message, ConfigError.exit_code))
    if process.is_first:
        # The store ends with this process: the others need a moment to read it.
        time.sleep(_SECONDS_TO_READ)
    raise ConfigError(message)


def _wait_for_others(store: RunStore, process: ProcessInfo, timeout: timedelta) -> None:
    """Raises ConfigError where one of them was given another WORLD_SIZE, DiffusionRuntimeError where one is not there
    in time."""
    deadline = time.monotonic() + timeout.total_seconds()
    names = [f"joined/{rank}" for rank in range(process.world_size)]

    def give_up() -> bool:
        ending = store.ending()
        if ending is not None:
            if process.is_first:
                time.sleep(_SECONDS_TO_READ)
            raise ConfigError(ending.message)
        return time.monotonic() >= deadline

    if not store.wait(names, give_up):
        missing = [rank for rank, name in enumerate(names) if not store.has(name)]
        raise DiffusionRuntimeError(
            f"rank {process.rank}: ranks {', '.join(map(str, missing[:8]))} of {process.world_size} did not come to "
            f"{_meeting(process)} within {timeout.total_seconds():.0f} s; are they running, and are MASTER_ADDR and "
            "MASTER_PORT the same everywhere?"
        )


def _no_answer(process: ProcessInfo, seconds: float) -> str:
    return (
        f"rank {process.rank}: no rendezvous store answers at {_meeting(process)} after {seconds:.0f} s; is rank "
        "0 running, and are MASTER_ADDR and MASTER_PORT the same everywhere?"
    )
