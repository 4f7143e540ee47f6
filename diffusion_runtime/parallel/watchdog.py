"""Processes that watch each other: one that dies, stops or hangs ends the run on all of them.

Each process has a thread that says twice a second that it lives and where its main thread is, and reads the same of the
others. A process hangs when its main thread has neither moved nor computed for `timeout` seconds while another one
waited for it as long; who waits, in a collective or for the first process's work, is never to blame. While a model is
loaded other threads' work counts too, and what is read and written: a download is no hang.
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
from diffusion_runtime.parallel.orphans import GRACE_SECONDS, end_this_process
from diffusion_runtime.parallel.process_info import ProcessInfo
from diffusion_runtime.parallel.process_state import children_of, is_alive, variable_of
from diffusion_runtime.parallel.run_store import RunStore
from diffusion_runtime.parallel.signs_of_life import SignsOfLife
from diffusion_runtime.parallel.thread_sampler import ThreadSampler

BEAT_SECONDS = 0.5
_LONGEST_GAP_SECONDS = 3.0
# Before a config has said another one.
LOADING_TIMEOUT_SECONDS = 40.0


@dataclass(frozen=True)
class _Heartbeat:
    """What a process says. count: grows with each beat; processes: where its number means something; has_left: it
    ended as it should."""

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
    """The thread, and what its main thread tells it.

    announce: called at most once, on the process that is believed, with why the run ends. thread: the one that runs
    the model, whose waiting and hanging is judged; None for the thread that makes this.
    """

    def __init__(
        self,
        board: RunStore,
        place: ProcessInfo,
        announce: Callable[[RankFailure], None],
        thread: threading.Thread | None = None,
    ) -> None:
        self._board = board
        self._place = place
        self._announce = announce
        self._observer = ThreadSampler((threading.current_thread() if thread is None else thread).ident or 0)
        self._count = 0
        self._timeout = LOADING_TIMEOUT_SECONDS
        self._is_loading = True
        self._is_idle = False
        self._stopped = threading.Event()
        self._store_loss_reported = threading.Lock()
        self._looked = time.monotonic()
        self._others = {rank: SignsOfLife() for rank in range(place.world_size) if rank != place.rank}
        self._siblings: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._beat(has_left=False)
        self._thread.start()

    def judge_loading(self, timeout: float) -> None:
        """A process that does nothing at all for `timeout` seconds while others wait for it is at fault."""
        self._timeout = timeout

    def enable_hang_detection(self, timeout: float) -> None:
        """From now on a main thread that does not move for `timeout` seconds is at fault, whatever other threads do."""
        self._timeout = timeout
        self._is_loading = False

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """In the block this process waits for work that nobody has to give: however long, no other is at fault."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False

    def stop(self) -> None:
        """Leave the run in order: nobody misses this process afterwards."""
        self._stopped.set()
        self._thread.join(timeout=GRACE_SECONDS)
        self._beat(has_left=True)

    def end(self, failure: RankFailure) -> RankFailure:
        """End the run because of `failure`, unless it has ended already; returns why it did."""
        if self._board.end(failure):
            self._announce(failure)
            return failure
        return self._board.ending() or failure

    def report_store_lost(self) -> None:
        """The store does not answer any more. With torch's launcher it stood there, and nobody is left to be told; else
        it stood in the first process, and the second one says so, once."""
        if self._place.has_agent or self._place.rank != 1 or not self._store_loss_reported.acquire(blocking=False):
            return
        what = "rank 0 is gone: it was killed or crashed, and the store where all processes meet with it"
        self._announce(RankFailure(0, "ProcessLostError", what))

    def find_stalled_rank(self, seconds: float) -> RankFailure | None:
        """Who keeps the others waiting, now that this process has waited for `seconds`; None if all of them wait."""
        for rank, beat in self._read_beats().items():
            if not beat.waits and not beat.has_left and rank != self._place.rank:
                return _process_failure(rank, beat, f"has kept others waiting for {seconds:.0f} s, at {beat.place}")
        return None

    def _run(self) -> None:
        try:
            while not self._stopped.wait(BEAT_SECONDS):
                self._beat(has_left=False)
                ending = self._board.ending() or self._judge()
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
        self._board.set(f"beat/{self._place.rank}", json.dumps(vars(beat)))

    def _read_beats(self) -> dict[int, _Heartbeat]:
        """The last beat of every rank that has said one."""
        names = {rank: f"beat/{rank}" for rank in range(self._place.world_size)}
        # All of them, mostly, and then one call is enough.
        there = list(names) if self._board.has(*names.values()) else [r for r in names if self._board.has(names[r])]
        texts = self._board.get([names[rank] for rank in there])
        return {rank: _Heartbeat(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}

    def _judge(self) -> RankFailure | None:
        """Why the run has to end, if it has to."""
        beats = self._read_beats()
        lost = self._find_lost(beats)
        if lost is not None:
            rank, process, what = lost
            is_gone = process is not None and not is_alive(process)
            if is_gone and self._place.is_launched:
                # Our own launcher knows by which signal it died, and says it. It has to wait for this process, which
                # may be in a call that nobody answers any more.
                return RankFailure(rank, "ProcessLostError", what)
            failure = self.end(_lost_failure(rank, beats.get(rank), process, what))
            if process is not None and not is_gone and self._place.has_agent:
                # It cannot end by itself, and the launcher would wait long for it to.
                os.kill(process, signal.SIGKILL)
            return failure
        hanging = self._find_hanging(beats, self._timeout)
        return None if hanging is None else self.end(hanging)

    def _find_lost(self, beats: dict[int, _Heartbeat]) -> tuple[int, int | None, str] | None:
        """(rank, its process if it is on this host, how) of one that is dead or stopped."""
        now = time.monotonic()
        if now - self._looked > _LONGEST_GAP_SECONDS:
            # This process slept, and with it maybe the whole machine: what others did meanwhile is not known.
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
        """Its number, when it is on this host. One that has said nothing yet has the same launcher as this one."""
        if beat is not None:
            is_here = (beat.host, beat.processes) == (socket.gethostname(), _process_table())
            return beat.process if is_here else None
        if self._place.has_agent and rank not in self._siblings:
            for process in children_of(os.getppid()):
                if variable_of(process, "RANK") == str(rank):
                    self._siblings[rank] = process
        return self._siblings.get(rank)

    def _has_left(self, rank: int) -> bool:
        """It may have left, or said why the run ends, since its last beat was read."""
        if self._board.ending() is not None:
            return True
        beat = self._read_beats().get(rank)
        return beat is not None and beat.has_left

    def _find_hanging(self, beats: dict[int, _Heartbeat], timeout: float) -> RankFailure | None:
        """The longest idle of those that wait for nobody, if somebody waited for it as long."""
        idle = {
            rank: beat.process_idle_seconds if self._is_loading else beat.idle_seconds for rank, beat in beats.items()
        }
        if not any(beat.waits and beat.waiting_seconds >= timeout for beat in beats.values()):
            return None
        to_blame = {
            rank: beat for rank, beat in beats.items() if idle[rank] >= timeout and not beat.waits and not beat.has_left
        }
        if not to_blame:
            return None
        rank = max(to_blame, key=lambda rank: idle[rank])
        beat = to_blame[rank]
        what = f"hangs: it has been at {beat.place} for {idle[rank]:.0f} s while others wait for it (a larger"
        return _process_failure(rank, beat, f"{what} parallel.timeout waits longer)")


def _process_failure(rank: int, beat: _Heartbeat, what: str) -> RankFailure:
    return RankFailure(rank, "ProcessLostError", f"rank {rank} (process {beat.process} on {beat.host}) {what}")


def _lost_failure(rank: int, beat: _Heartbeat | None, process: int | None, what: str) -> RankFailure:
    if beat is not None:
        return _process_failure(rank, beat, what)
    where = "" if process is None else f" (process {process})"
    return RankFailure(rank, "ProcessLostError", f"rank {rank}{where} {what}")


def _process_table() -> str:
    """Containers of one host may share a name, and each counts its processes from 1."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
