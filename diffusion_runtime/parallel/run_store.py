"""Run store: a key-value store shared by all ranks (torch's rendezvous store), with heartbeats and the reason the run
ended.

It is kept by torch's launcher, outside the processes that compute, so it outlives them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.process_info import ProcessInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ENDED = "ended"
# Poll intervals of a wait in seconds: short at first, because most waits are.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


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
        """The values of keys that exist."""
        with self._lock:
            return [value.decode() for value in self._store.multi_get([self._prefix + name for name in names])]

    def has(self, *names: str) -> bool:
        """Whether all keys exist."""
        with self._lock:
            return bool(self._store.check([self._prefix + name for name in names]))

    def count(self, name: str) -> int:
        """Number of calls for `name` so far, this one included."""
        with self._lock:
            return int(self._store.add(self._prefix + name, 1))

    def wait(self, names: Sequence[str], give_up: Callable[[], bool]) -> bool:
        """Wait until all keys exist; False as soon as `give_up` returns True. `give_up` may raise."""
        pause = _FIRST_PAUSE
        while not self.has(*names):
            if give_up():
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def end(self, failure: RankFailure) -> bool:
        """Record why the run ends. The first record counts: True for the caller that made it."""
        text = failure.to_json()
        with self._lock:
            return bool(self._store.compare_set(self._prefix + _ENDED, "", text).decode() == text)

    def ending(self) -> RankFailure | None:
        """Why the run ends, once it is recorded."""
        return RankFailure.from_json(self.get([_ENDED])[0]) if self.has(_ENDED) else None

    def store(self) -> Store:
        """Another connection to the same store with its own key prefix, for torch's process groups."""
        return dist.PrefixStore(f"{self._prefix}groups", self._store.clone())  # type: ignore[attr-defined]


def connect(process: ProcessInfo, timeout: timedelta) -> RunStore:
    """The run store at the address in `process`. A process alone needs no port.

    Raises ConfigError when another run uses the same port, DiffusionRuntimeError when the store does not answer in
    time.
    """
    if process.world_size == 1 and not process.port:
        return RunStore(dist.HashStore(), "diffusion_runtime/")  # type: ignore[attr-defined]
    meeting = f"{process.address}:{process.port}"
    # An IPv6 address stands in brackets in an URL.
    host = f"[{process.address}]" if ":" in process.address else process.address
    try:
        store, _, _ = next(
            rendezvous(f"tcp://{host}:{process.port}", process.rank, process.world_size, timeout=timeout)
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise DiffusionRuntimeError(_no_answer(process, meeting, timeout)) from error
        raise ConfigError(
            f"MASTER_PORT {process.port} is in use on {process.address}: is another run started there? "
            "Take another port"
        ) from error
    except dist.DistError as error:
        raise DiffusionRuntimeError(_no_answer(process, meeting, timeout)) from error
    run_store = RunStore(store, f"diffusion_runtime/{process.attempt}/")
    if run_store.count(f"joined/{process.rank}") > 1:
        raise ConfigError(
            f"rank {process.rank} was started twice at {meeting}: another run meets there; take another MASTER_PORT "
            "(torchrun: --master-port, or --standalone)"
        )
    return run_store


def _no_answer(process: ProcessInfo, meeting: str, timeout: timedelta) -> str:
    return (
        f"rank {process.rank}: no rendezvous store answers at {meeting} after {timeout.total_seconds():.0f} s; is rank "
        "0 running, and are MASTER_ADDR and MASTER_PORT the same everywhere?"
    )
