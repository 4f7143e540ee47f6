"""Watchdog with heartbeats: a rank that dies, stops or hangs ends the run on all ranks.

A thread per process posts a heartbeat twice per second (alive, where the main thread is) to the run store and reads
those of the others. A process hangs when its main thread has neither moved nor used CPU time for `timeout` seconds
while another rank has waited for it as long. A rank that waits, in a collective or for rank 0's work, is never at
fault. While a model is loaded, work of other threads and disk and network traffic count too: a download is no hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.process_info import GRACE_SECONDS, ProcessInfo, end_this_process
from diffusion_runtime.parallel.run_store import RunStore
from diffusion_runtime.parallel.signs_of_life import SignsOfLife, children_of, is_alive, variable_of
from diffusion_runtime.parallel.thread_sampler import ThreadSampler

BEAT_SECONDS = 0.5
_LONGEST_GAP_SECONDS = 3.0
# Until a config sets another one.
LOADING_TIMEOUT_SECONDS = 40.0


@dataclass(frozen=True)
class _Heartbeat:
    """One heartbeat. count: grows with each one; processes: the PID namespace that `process` belongs to; has_left: the
    rank ended in order."""

    count: int
    process: int
    host: str
    processes: str
    place: str
    idle_seconds: float
    process_idle_seconds: float
    waiting_seconds: float
    waits: bool
    has_left: bool


class Watchdog:
    """The watchdog thread of one process.

    announce: called at most once, on the process that records the reason first, with why the run ends. thread: the
    one that runs the model, which is watched for waiting and hanging; None for the thread that makes this.
    """

    def __init__(
        self,
        store: RunStore,
        place: ProcessInfo,
        announce: Callable[[RankFailure], None],
        thread: threading.Thread | None = None,
    ) -> None:
        self._store = store
        self._place = place
        self._announce = announce
        self._observer = ThreadSampler((threading.current_thread() if thread is None else thread).ident or 0)
        self._count = 0
        self._timeout = LOADING_TIMEOUT_SECONDS
        self._is_loading = True
        self._is_idle = False
        self._stopped = threading.Event()
        self._store_loss_reported = threading.Lock()
        self._reporting = threading.Lock()
        self._looked = time.monotonic()
        self._others = {rank: SignsOfLife() for rank in range(place.world_size) if rank != place.rank}
        self._siblings: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._beat(has_left=False)
        self._thread.start()

    def judge_loading(self, timeout: float) -> None:
        """While loading: a process without any activity for `timeout` seconds while others wait for it is at fault."""
        self._timeout = timeout

    def enable_hang_detection(self, timeout: float) -> None:
        """Treat a main thread without a move for `timeout` seconds as at fault, whatever other threads do."""
        self._timeout = timeout
        self._is_loading = False

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Context manager: this process waits for outside work; however long, no other process is at fault."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False

    def stop(self) -> None:
        """Leave the run in order: the missing heartbeat is not reported afterwards."""
        self._stopped.set()
        self._thread.join(timeout=GRACE_SECONDS)
        self._beat(has_left=True)

    def end(self, failure: RankFailure) -> RankFailure:
        """End the run because of `failure`, unless it has ended already; returns the recorded reason."""
        with self._reporting:
            if self._store.end(failure):
                self._announce(failure)
                return failure
        return self._store.ending() or failure

    @property
    def is_reporting(self) -> bool:
        """True while a thread of this process records and announces why the run ends."""
        return self._reporting.locked()

    def ending(self) -> RankFailure | None:
        """Return why the run ends, or None; once recorded, and announced if this process is the one to announce it."""
        ending = self._store.ending()
        # The caller may end the process, and with it the thread that has recorded the reason but not announced it yet.
        if ending is not None and self._reporting.acquire(timeout=GRACE_SECONDS):
            self._reporting.release()
        return ending

    def report_store_lost(self) -> None:
        """Report once that the rendezvous store is unreachable, from rank 1 if rank 0 hosted it. With torch's launcher
        the launcher hosted it, and no rank reports."""
        if self._place.has_agent or self._place.rank != 1 or not self._store_loss_reported.acquire(blocking=False):
            return
        what = "rank 0 is gone: it was killed or crashed, and the rendezvous store with it"
        self._announce(RankFailure(0, "ProcessLostError", what))

    def find_stalled_rank(self, seconds: float) -> RankFailure | None:
        """Return the rank that keeps others waiting, after this one waited `seconds`; None if all of them wait."""
        for rank, beat in self._read_beats().items():
            if not beat.waits and not beat.has_left and rank != self._place.rank:
                return _process_failure(rank, beat, f"has kept others waiting for {seconds:.0f} s, at {beat.place}")
        return None

    def _run(self) -> None:
        try:
            while not self._stopped.wait(BEAT_SECONDS):
                self._beat(has_left=False)
                ending = self._store.ending() or self._judge()
                if ending is not None and not self._stopped.is_set():
                    end_this_process(ending.exit_code)
        except dist.DistError:
            if not self._stopped.is_set():
                self.report_store_lost()
                end_this_process(1)

    def _beat(self, *, has_left: bool) -> None:
        self._count += 1
        is_idle = self._is_idle
        if is_idle:
            # What comes after is a wait of its own.
            self._observer.forget_waiting()
        seen = self._observer.look()
        beat = _Heartbeat(
            count=self._count,
            process=os.getpid(),
            host=socket.gethostname(),
            processes=_process_table(),
            place=seen.place,
            idle_seconds=seen.idle_seconds,
            process_idle_seconds=seen.process_idle_seconds,
            waiting_seconds=0.0 if is_idle else seen.waiting_seconds,
            waits=is_idle or seen.waits,
            has_left=has_left,
        )
        self._store.set(f"beat/{self._place.rank}", json.dumps(vars(beat)))

    def _read_beats(self) -> dict[int, _Heartbeat]:
        """Read the last heartbeat of every rank that has posted one."""
        names = {rank: f"beat/{rank}" for rank in range(self._place.world_size)}
        # Usually all exist, and then one call is enough.
        posted = list(names) if self._store.has(*names.values()) else [r for r in names if self._store.has(names[r])]
        texts = self._store.get([names[rank] for rank in posted])
        return {rank: _Heartbeat(**json.loads(text)) for rank, text in zip(posted, texts, strict=True)}

    def _judge(self) -> RankFailure | None:
        """Return why the run has to end, or None if it may go on."""
        beats = self._read_beats()
        lost = self._find_lost(beats)
        if lost is not None:
            rank, process, what = lost
            is_gone = process is not None and not is_alive(process)
            if is_gone and self._place.is_launched:
                # Our own launcher knows by which signal the rank died, and reports it. It has to wait for this process,
                # which may be in a collective that will never complete.
                return RankFailure(rank, "ProcessLostError", what)
            failure = self.end(_lost_failure(rank, beats.get(rank), process, what))
            if process is not None and not is_gone and self._place.has_agent:
                # It cannot end by itself, and the launcher would wait long for it to.
                os.kill(process, signal.SIGKILL)
            return failure
        hanging = self._find_hanging(beats, self._timeout)
        return None if hanging is None else self.end(hanging)

    def _find_lost(self, beats: dict[int, _Heartbeat]) -> tuple[int, int | None, str] | None:
        """(rank, its process id if it is on this host, how) of a rank that is dead or stopped."""
        now = time.monotonic()
        if now - self._looked > _LONGEST_GAP_SECONDS:
            # This process was suspended, and with it maybe the whole machine: the timers restart.
            for signs in self._others.values():
                signs.forget()
        self._looked = now
        for rank, signs in self._others.items():
            beat = beats.get(rank)
            if beat is not None and beat.has_left:
                continue
            process = self._process_of(rank, beat)
            how = signs.look(None if beat is None else beat.count, process, now)
            if how is not None and not self._has_left(rank):
                return rank, process, how
        return None

    def _process_of(self, rank: int, beat: _Heartbeat | None) -> int | None:
        """Return a rank's process id on this host, else None. A rank without a heartbeat has this one's launcher."""
        if beat is not None:
            is_here = (beat.host, beat.processes) == (socket.gethostname(), _process_table())
            return beat.process if is_here else None
        if self._place.has_agent and rank not in self._siblings:
            for process in children_of(os.getppid()):
                if variable_of(process, "RANK") == str(rank):
                    self._siblings[rank] = process
        return self._siblings.get(rank)

    def _has_left(self, rank: int) -> bool:
        """Return True if a rank has left, or the end of the run was recorded, since its last heartbeat was read."""
        if self._store.ending() is not None:
            return True
        beat = self._read_beats().get(rank)
        return beat is not None and beat.has_left

    def _find_hanging(self, beats: dict[int, _Heartbeat], timeout: float) -> RankFailure | None:
        """Return the rank that has been idle longest and does not wait itself, if another one has waited for it for
        `timeout` seconds."""
        idle = {
            rank: beat.process_idle_seconds if self._is_loading else beat.idle_seconds for rank, beat in beats.items()
        }
        if not any(beat.waits and beat.waiting_seconds >= timeout for beat in beats.values()):
            return None
        stalled = {
            rank: beat for rank, beat in beats.items() if idle[rank] >= timeout and not beat.waits and not beat.has_left
        }
        if not stalled:
            return None
        rank = max(stalled, key=lambda rank: idle[rank])
        beat = stalled[rank]
        what = f"hangs: it has been at {beat.place} for {idle[rank]:.0f} s while others wait for it (to wait"
        return _process_failure(rank, beat, f"{what} longer, raise parallel.timeout)")


def _process_failure(rank: int, beat: _Heartbeat, what: str) -> RankFailure:
    return RankFailure(rank, "ProcessLostError", f"rank {rank} (process {beat.process} on {beat.host}) {what}")


def _lost_failure(rank: int, beat: _Heartbeat | None, process: int | None, what: str) -> RankFailure:
    if beat is not None:
        return _process_failure(rank, beat, what)
    where = "" if process is None else f" (process {process})"
    return RankFailure(rank, "ProcessLostError", f"rank {rank}{where} {what}")


def _process_table() -> str:
    """Return the PID namespace: containers of one host may share a host name, and each counts its processes from 1."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
