"""All ranks of a run as seen from one of them: rendezvous, broadcast from rank 0, agreement on success, orderly end.

Rank 0 encodes texts, writes files and prints. The others receive what it makes alone. They wait for that through the
run store, for any length of time: only a process without any activity is at fault. Collectives in between are short,
because all ranks do the same work, and have a timeout.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import TypeAlias

import torch
import torch.distributed as dist

from diffusion_runtime.errors import Cancelled, ConfigError, DiffusionRuntimeError, shown
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.failure import FirstProcessError, RankFailure, RunEnded
from diffusion_runtime.parallel.process_info import ProcessInfo, end_with_launcher
from diffusion_runtime.parallel.run_store import RunStore, connect
from diffusion_runtime.parallel.signs_of_life import SILENT_SECONDS
from diffusion_runtime.parallel.watchdog import BEAT_SECONDS, Watchdog

MEETING_SECONDS = 60.0
# How long a rank that failed waits for the others to fail alike, which shows that no rank is ahead of another.
IN_STEP_SECONDS = 5.0
# A collective without an answer raises by itself, after the watchdog had time to find the rank at fault. It may wait
# for a whole step of another process, which takes minutes on a slow machine; and on an accelerator its time is counted
# from when it was queued, behind a step's work.
_LONGEST_STEP_SECONDS = 900.0


# (rank, error) -> the error as a failure with a message for users.
Describe: TypeAlias = Callable[[int, BaseException], RankFailure]


class World:
    """This process among all of the run's. `join` makes one; `leave` or `end` closes it.

    All ranks must call `from_first`, `broadcast` and `agree` in the same order.
    """

    def __init__(self, place: ProcessInfo, store: RunStore, watchdog: Watchdog, describe: Describe) -> None:
        self.place = place
        self.device = torch.device("cpu")
        self._store = store
        self._watchdog = watchdog
        self._describe = describe
        self._collective_seconds = 0.0
        self._num_agreements = 0
        self._has_met = False
        self._num_replies = 0

    @classmethod
    def join(
        cls,
        place: ProcessInfo,
        *,
        announce: Callable[[RankFailure], None],
        describe: Describe | None = None,
        thread: threading.Thread | None = None,
    ) -> World:
        """Meet the other ranks at the rendezvous. announce: called once, on one rank, with why the run ends early.

        describe: the failure that is reported for an error that ends the run; by default its type and first line.
        thread: the one that will run the model, which the watchdog looks at; None for the one that calls this.

        Raises ConfigError when another run uses the same port, DiffusionRuntimeError when the others do not come.
        """
        end_with_launcher(place)
        store = connect(place, timedelta(seconds=MEETING_SECONDS))
        watchdog = Watchdog(store, place, announce, thread)
        watchdog.start()
        return cls(place, store, watchdog, describe if describe is not None else describe_error)

    @property
    def has_met(self) -> bool:
        """True once all ranks have met at one point: before that, a rank that failed may never have been here."""
        return self._has_met

    @property
    def size(self) -> int:
        return self.place.world_size

    @property
    def is_first(self) -> bool:
        return self.place.is_first

    @property
    def group(self) -> RankGroup:
        """All processes, by rank."""
        everyone = dist.group.WORLD
        assert everyone is not None
        return RankGroup.of(everyone)

    @property
    def collective_timeout(self) -> timedelta:
        """Time that a collective of any group waits for a process, once groups are open."""
        return timedelta(seconds=self._collective_seconds)

    def open_groups(self, device: torch.device, timeout: float) -> None:
        """Initialise torch.distributed between all ranks: NCCL for CUDA, gloo for the CPU. A second model on the same
        device uses the same groups.

        timeout: seconds that ranks wait for one that does not move. Raises ConfigError for another device.
        """
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device: several processes need cuda or cpu, got {device}; use --device cpu")
        if dist.is_initialized():
            if device != self.device:
                raise ConfigError(
                    f"device: these processes share a model on {self.device} already, and can share another on that "
                    f"device alone, got {device}; call leave() first, or start again"
                )
            return
        self._watchdog.judge_loading(timeout)
        is_cuda = device.type == "cuda"
        seconds = max(_LONGEST_STEP_SECONDS, 2 * timeout)
        self.device = device
        self._collective_seconds = seconds
        if is_cuda:
            torch.cuda.set_device(device)
        self.wait_for_all()
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=self._store.store(),
            rank=self.place.rank,
            world_size=self.size,
            timeout=timedelta(seconds=seconds),
            device_id=device if is_cuda else None,
        )

    def wait_for_all(self) -> None:
        """Wait for all ranks without a time limit: a model may have to be downloaded first."""
        self.agree(None)

    def enable_hang_detection(self, timeout: float) -> None:
        """End the run from now on if a process does not move for `timeout` seconds while others wait for it."""
        self._watchdog.enable_hang_detection(timeout)

    def idle(self) -> AbstractContextManager[None]:
        """Context manager: this process waits for work, however long; it is not a hang."""
        return self._watchdog.idle()

    def from_first(self, make: Callable[[], str]) -> str:
        """Return on all ranks what `make` returns on rank 0; it is called on rank 0 alone.

        Raises on rank 0 what `make` raises, and FirstProcessError on the others.
        """
        name = f"reply/{self._num_agreements}/{self._num_replies}"
        self._num_replies += 1
        if self.is_first:
            try:
                text = make()
            except Exception as error:
                failure = self._failure_of(error)
                self._store.set(name, json.dumps({"failure": failure.to_json()}))
                raise
            self._store.set(name, json.dumps({"text": text}))
            return text
        self._store.wait([name], give_up=lambda: False)
        reply = json.loads(self._store.get([name])[0])
        if "failure" in reply:
            raise FirstProcessError(RankFailure.from_json(reply["failure"]))
        return str(reply["text"])

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as rank 0 has it, contiguous; on the others it is overwritten. It has the same shape on all
        ranks."""
        # The memory is sent, whatever the strides.
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=0)
        return tensor

    def agree(self, failure: RankFailure | None) -> RankFailure | None:
        """Wait for every rank, and return None if none failed, or the failure if it was the same one on all.

        A failure of some ranks only leaves them out of step: it ends the run, and RunEnded is raised.
        """
        names = [f"agreed/{self._num_agreements}/{rank}" for rank in range(self.size)]
        self._num_agreements += 1
        self._num_replies = 0
        self._store.set(names[self.place.rank], "" if failure is None else failure.to_json())
        deadline = _Deadline(IN_STEP_SECONDS)
        self._store.wait(names, give_up=lambda: deadline.is_over(lambda: bool(self._failures(names))))
        self._has_met = True
        failures = self._failures(names)
        if not failures:
            return None
        if len(failures) == self.size and len({(each.kind, each.message) for each in failures}) == 1:
            return failures[0]
        raise RunEnded(self.end(failures[0]))

    def run_alike(self, given: str, work: Callable[[], None]) -> None:
        """`work` on every rank. given: what it is made of, which must be the same on all.

        Raises what `work` raises where all ranks meet it, and RunEnded when an error meets only some of them.
        """
        first = self.from_first(lambda: given)
        try:
            if given != first:
                raise ConfigError(
                    f"rank {self.place.rank}: expected {shown(first)}, as rank 0 has it, got {shown(given)}"
                )
            work()
        except Exception as error:
            self.agree(self.failure_of(error))
            raise
        self.agree(None)

    def _failures(self, names: list[str]) -> list[RankFailure]:
        texts = self._store.get([name for name in names if self._store.has(name)])
        return [RankFailure.from_json(text) for text in texts if text]

    def failure_of(self, error: BaseException) -> RankFailure:
        """Return what an error on this rank means for the run.

        A broken connection is mostly another rank's death, which the watchdog detects: wait for that.
        """
        if _is_of_transport(error):
            if "timed out" in str(error).lower() and (
                stalled := self._watchdog.find_stalled_rank(self._collective_seconds)
            ):
                return stalled
            # The watchdog ends this wait with RunEnded, in the main thread, as soon as it knows the cause.
            self._wait_for_ending(SILENT_SECONDS + IN_STEP_SECONDS)
        return self._failure_of(error)

    def _failure_of(self, error: BaseException) -> RankFailure:
        if isinstance(error, FirstProcessError):
            return error.failure
        failure = self._describe(self.place.rank, error)
        if not _is_of_transport(error):
            return failure
        lost = f"rank {self.place.rank}: lost the connection to the other processes: {first_line(error)}"
        return dataclasses.replace(failure, message=lost)

    def _wait_for_ending(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                if (ending := self._store.ending()) is not None:
                    raise RunEnded(ending)
                time.sleep(0.1)
        except dist.DistError:
            self._watchdog.report_store_lost()
            raise

    def end(self, failure: RankFailure) -> RankFailure:
        """End the run on all ranks; returns why it ended, which another rank may have recorded before."""
        return self._watchdog.end(failure)

    def end_unreported(self, failure: RankFailure) -> None:
        """End the run for a reason that was already reported."""
        self._store.end(failure)

    def ending(self) -> RankFailure | None:
        """Return why the run ends, or None; once recorded, and announced if this process is the one to announce it."""
        return self._watchdog.ending()

    @property
    def is_reporting(self) -> bool:
        """True while a thread of this process records and announces why the run ends."""
        return self._watchdog.is_reporting

    def leave(self) -> None:
        """Leave in order, after a last `agree`. Rank 0 goes last: it hosts the store without torch's launcher."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._watchdog.stop()
        if not self.is_first:
            self._store.set(f"left/{self.place.rank}", "")
            return
        deadline = time.monotonic() + SILENT_SECONDS
        others = [f"left/{rank}" for rank in range(1, self.size)]
        self._store.wait(others, give_up=lambda: time.monotonic() >= deadline or self._store.ending() is not None)

    def leave_failed(self, failure: RankFailure) -> None:
        """End the run on the others because of `failure`; this process goes on, to end in its own way."""
        # Else the watchdog would end it, as it does the others.
        self._watchdog.stop()
        self.end(failure)
        if self.is_first and self.size > 1 and not self.place.has_agent:
            # The store is in this process: the others need a moment to read why.
            time.sleep(4 * BEAT_SECONDS)


class _Deadline:
    """A deadline that starts when a condition is first seen; the condition is polled twice per second."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looked = self._since = 0.0

    def is_over(self, seen: Callable[[], bool]) -> bool:
        now = time.monotonic()
        if now - self._looked >= 0.5:
            self._looked = now
            if not self._since and seen():
                self._since = now
        return bool(self._since) and now - self._since >= self._seconds


def describe_error(rank: int, error: BaseException) -> RankFailure:
    """Describe an error as a failure that ends the run."""
    trace = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    if isinstance(error, DiffusionRuntimeError | Cancelled):
        return RankFailure(rank, kind, str(error), error.exit_code, trace)
    return RankFailure(rank, kind, f"rank {rank}: unexpected {kind}: {first_line(error)}", 1, trace)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _is_of_transport(error: BaseException) -> bool:
    """Return True if the error comes from communication between processes: gloo raises bare RuntimeErrors."""
    if isinstance(error, DiffusionRuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _innermost_module(error.__traceback__).startswith(
        ("torch.distributed", "diffusion_runtime.parallel")
    )


def _innermost_module(where: TracebackType | None) -> str:
    module = ""
    while where is not None:
        module = str(where.tb_frame.f_globals.get("__name__", ""))
        where = where.tb_next
    return module
