"""Processes that watch each other: one that dies, stops or hangs ends the run on all of them.

Each process has a thread that says twice a second that it lives and where its main thread is, and reads the same of the
others. A process hangs when its main thread has neither moved nor computed for `timeout` seconds while another one
waited for it as long; who waits, in a collective or for the first process's work, is never to blame.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from diffusion_runtime.parallel.board import Board
from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.place import Place
from diffusion_runtime.parallel.whereabouts import ThreadObserver

BEAT_SECONDS = 0.5
# A process that has said nothing for so long is gone, or stopped: its thread beats whatever the main thread does.
LOST_SECONDS = 15.0
_LONGEST_GAP_SECONDS = 3.0
# What the main thread gets to end by itself, temporary files included, once the run is over.
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class _Beat:
    """What a process says. count: grows with each beat; processes: where its number means something; has_left: it
    ended as it should."""

    count: int
    process: int
    host: str
    processes: str
    place: str
    still_seconds: float
    idle_seconds: float
    waits: bool
    has_left: bool


class Watch:
    """The thread, and what its main thread tells it.

    announce: called at most once, on the process that is believed, with why the run ends.
    """

    def __init__(self, board: Board, place: Place, announce: Callable[[RankFailure], None]) -> None:
        self._board = board
        self._place = place
        self._announce = announce
        self._observer = ThreadObserver(threading.main_thread().ident or 0)
        self._parent = os.getppid()
        self._count = 0
        self._timeout: float | None = None
        self._stopped = threading.Event()
        self._mourning = threading.Lock()
        self._looked = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._beat(has_left=False)
        self._thread.start()

    def judge_hangs(self, timeout: float) -> None:
        """From now on a main thread that does not move for `timeout` seconds is at fault. Before, it may be waiting for
        a download."""
        self._timeout = timeout

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

    def mourn_board(self) -> None:
        """The store does not answer any more. With torch's launcher it stood there, and nobody is left to be told; else
        it stood in the first process, and the second one says so, once."""
        if self._place.has_agent or self._place.rank != 1 or not self._mourning.acquire(blocking=False):
            return
        what = "rank 0 is gone: it was killed or crashed, and the store where all processes meet with it"
        self._announce(RankFailure(0, "ProcessLostError", what))

    def blame(self, seconds: float) -> RankFailure | None:
        """Who keeps the others waiting, now that this process has waited for `seconds`; None if all of them wait."""
        for rank, beat in self._read_beats().items():
            if not beat.waits and not beat.has_left and rank != self._place.rank:
                return _process_failure(rank, beat, f"has kept others waiting for {seconds:.0f} s, at {beat.place}")
        return None

    def _run(self) -> None:
        try:
            while not self._stopped.wait(BEAT_SECONDS):
                self._beat(has_left=False)
                if self._place.has_agent and os.getppid() != self._parent:
                    self._leave(1)
                ending = self._board.ending() or self._judge()
                if ending is not None and not self._stopped.is_set():
                    self._leave(ending.exit_code)
        except dist.DistError:
            if not self._stopped.is_set():
                self.mourn_board()
                self._leave(1)

    def _beat(self, *, has_left: bool) -> None:
        self._count += 1
        seen = self._observer.look()
        beat = _Beat(
            count=self._count,
            process=os.getpid(),
            host=socket.gethostname(),
            processes=_process_table(),
            place=seen.place,
            still_seconds=seen.still_seconds,
            idle_seconds=seen.idle_seconds,
            waits=seen.waits,
            has_left=has_left,
        )
        self._board.set(f"beat/{self._place.rank}", json.dumps(vars(beat)))

    def _read_beats(self) -> dict[int, _Beat]:
        """The last beat of every rank that has said one."""
        names = {rank: f"beat/{rank}" for rank in range(self._place.world_size)}
        # All of them, mostly, and then one question is enough.
        there = list(names) if self._board.has(*names.values()) else [r for r in names if self._board.has(names[r])]
        texts = self._board.get([names[rank] for rank in there])
        return {rank: _Beat(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}

    def _judge(self) -> RankFailure | None:
        """Why the run has to end, if it has to."""
        beats = self._read_beats()
        lost = self._find_lost(beats)
        if lost is not None:
            failure = self.end(_process_failure(lost, beats[lost], self._how_lost(beats[lost])))
            if self._is_neighbour(beats[lost]) and self._place.has_agent and _is_alive(beats[lost].process):
                # It may only be stopped, and the launcher would wait long for it to end.
                os.kill(beats[lost].process, signal.SIGKILL)
            return failure
        hanging = None if self._timeout is None else self._find_hanging(beats, self._timeout)
        return None if hanging is None else self.end(hanging)

    def _find_lost(self, beats: dict[int, _Beat]) -> int | None:
        """The rank of a process that is dead or stopped."""
        now = time.monotonic()
        if now - self._looked > _LONGEST_GAP_SECONDS:
            # This process slept, and with it maybe the whole machine: what others did meanwhile is not known.
            self._heard.clear()
        self._looked = now
        for rank, beat in beats.items():
            count, since = self._heard.get(rank, (-1, now))
            if beat.count != count:
                count, since = beat.count, now
            self._heard[rank] = count, since
            if beat.has_left or rank == self._place.rank:
                continue
            # Our own launcher knows by which signal a process died; it is faster, and says it.
            is_gone = self._is_neighbour(beat) and not self._place.is_launched and not _is_alive(beat.process)
            if is_gone or now - since >= LOST_SECONDS:
                return rank
        return None

    def _is_neighbour(self, beat: _Beat) -> bool:
        return (beat.host, beat.processes) == (socket.gethostname(), _process_table())

    def _how_lost(self, beat: _Beat) -> str:
        if self._is_neighbour(beat) and not _is_alive(beat.process):
            return "is gone: it was killed or crashed"
        return f"has given no sign of life for {LOST_SECONDS:.0f} s"

    def _find_hanging(self, beats: dict[int, _Beat], timeout: float) -> RankFailure | None:
        """The longest idle of those that wait for nobody, if somebody waited for it as long."""
        if not any(beat.waits and beat.still_seconds >= timeout for beat in beats.values()):
            return None
        to_blame = {
            rank: beat
            for rank, beat in beats.items()
            if beat.idle_seconds >= timeout and not beat.waits and not beat.has_left
        }
        if not to_blame:
            return None
        rank = max(to_blame, key=lambda rank: to_blame[rank].idle_seconds)
        beat = to_blame[rank]
        what = f"hangs: it has been at {beat.place} for {beat.idle_seconds:.0f} s while others wait for it (a larger"
        return _process_failure(rank, beat, f"{what} parallel.timeout waits longer)")

    def _leave(self, exit_code: int) -> None:
        """End this process: first as SIGTERM does, so that temporary files go; if the main thread is stuck, at once."""
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopped.wait(GRACE_SECONDS):
            os._exit(exit_code or 1)


def _process_failure(rank: int, beat: _Beat, what: str) -> RankFailure:
    return RankFailure(rank, "ProcessLostError", f"rank {rank} (process {beat.process} on {beat.host}) {what}")


def _process_table() -> str:
    """Containers of one host may share a name, and each counts its processes from 1."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
