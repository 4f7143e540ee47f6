"""All processes of a run, seen from one of them: what the first one tells the others, and whether all succeeded.

The first process (rank 0) encodes texts, writes files and speaks. What it makes alone the others get from it. Waits for
that go through the board and may last: only a process that does nothing at all is at fault. Collectives in between are
short, because all processes do the same work, and have a timeout.
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

from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.parallel.failure import FirstProcessError, RankFailure, RunEnded
from diffusion_runtime.parallel.orphans import end_with_launcher
from diffusion_runtime.parallel.process_info import ProcessInfo
from diffusion_runtime.parallel.rank_group import RankGroup
from diffusion_runtime.parallel.run_store import RunStore, connect
from diffusion_runtime.parallel.signs_of_life import SILENT_SECONDS
from diffusion_runtime.parallel.watchdog import BEAT_SECONDS, Watchdog

MEETING_SECONDS = 60.0
# How long a process that failed waits for the others to fail alike, which shows that all of them are still in step.
IN_STEP_SECONDS = 5.0
# A collective that nobody answers raises by itself, after the watch had time to say whose fault it is. It may wait for
# a whole step of another process, which takes minutes on a slow machine; and on an accelerator its time is counted from
# when it was queued, behind a step's work.
_LONGEST_STEP_SECONDS = 900.0


# (rank, error) -> what it says to people.
Describe: TypeAlias = Callable[[int, BaseException], RankFailure]


class World:
    """This process among all of the run's. `join` makes one; `leave` or `end` it.

    All processes must call `from_first`, `broadcast` and `agree` in the same order.
    """

    def __init__(self, place: ProcessInfo, board: RunStore, watch: Watchdog, describe: Describe) -> None:
        self.place = place
        self.device = torch.device("cpu")
        self._board = board
        self._watch = watch
        self._describe = describe
        self._collective_seconds = 0.0
        self._num_agreements = 0
        self._num_told = 0

    @classmethod
    def join(
        cls,
        place: ProcessInfo,
        *,
        announce: Callable[[RankFailure], None],
        describe: Describe | None = None,
        thread: threading.Thread | None = None,
    ) -> World:
        """Meet the other processes. announce: told once, on one process, why the run ends before its end.

        describe: what an error that ends the run says to people; by default its type and first line. thread: the one
        that will run the model, which the watchdog looks at; None for the one that calls this.

        Raises ConfigError when another run uses the same port, DiffusionRuntimeError when the others do not come.
        """
        end_with_launcher(place)
        board = connect(place, timedelta(seconds=MEETING_SECONDS))
        watch = Watchdog(board, place, announce, thread)
        watch.start()
        return cls(place, board, watch, describe if describe is not None else describe_error)

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
        """How long a collective of any group waits for a process, once groups are open."""
        return timedelta(seconds=self._collective_seconds)

    def open_groups(self, device: torch.device, timeout: float) -> None:
        """Set torch.distributed up between all processes: NCCL for CUDA, gloo for the CPU. A second model on the same
        device uses what the first one set up.

        timeout: seconds that processes wait for one that does not move. Raises ConfigError for another device.
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
        self._watch.judge_loading(timeout)
        is_cuda = device.type == "cuda"
        seconds = max(_LONGEST_STEP_SECONDS, 2 * timeout)
        self.device = device
        self._collective_seconds = seconds
        if is_cuda:
            torch.cuda.set_device(device)
        self.wait_for_all()
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=self._board.store(),
            rank=self.place.rank,
            world_size=self.size,
            timeout=timedelta(seconds=seconds),
            device_id=device if is_cuda else None,
        )

    def wait_for_all(self) -> None:
        """Until every process is here, however long that takes: a model may have to be downloaded first."""
        self.agree(None)

    def enable_hang_detection(self, timeout: float) -> None:
        """From here on a process that does not move for `timeout` seconds while others wait for it ends the run."""
        self._watch.enable_hang_detection(timeout)

    def idle(self) -> AbstractContextManager[None]:
        """A block in which this process waits for work, however long; nobody is at fault for that."""
        return self._watch.idle()

    def from_first(self, make: Callable[[], str]) -> str:
        """What `make` returns on the first process, on all of them; it is called there alone.

        Raises on the first process what `make` raises, and FirstProcessError on the others.
        """
        name = f"told/{self._num_agreements}/{self._num_told}"
        self._num_told += 1
        if self.is_first:
            try:
                text = make()
            except Exception as error:
                failure = self._failure_of(error)
                self._board.set(name, json.dumps({"failure": failure.to_json()}))
                raise
            self._board.set(name, json.dumps({"text": text}))
            return text
        self._board.wait([name], give_up=lambda: False)
        told = json.loads(self._board.get([name])[0])
        if "failure" in told:
            raise FirstProcessError(RankFailure.from_json(told["failure"]))
        return str(told["text"])

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as the first process has it, contiguous; on the others it is overwritten. All must have it in one
        shape."""
        # What travels is the memory, whatever the strides.
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=0)
        return tensor

    def agree(self, failure: RankFailure | None) -> RankFailure | None:
        """Whether every process got here unharmed; the failure, when it was the same one on all.

        One that only some processes met leaves them out of step: it ends the run, and RunEnded is raised.
        """
        names = [f"agreed/{self._num_agreements}/{rank}" for rank in range(self.size)]
        self._num_agreements += 1
        self._num_told = 0
        self._board.set(names[self.place.rank], "" if failure is None else failure.to_json())
        patience = _Patience(IN_STEP_SECONDS)
        self._board.wait(names, give_up=lambda: patience.is_over(lambda: bool(self._failures(names))))
        failures = self._failures(names)
        if not failures:
            return None
        if len(failures) == self.size and len({(each.kind, each.message) for each in failures}) == 1:
            return failures[0]
        raise RunEnded(self.end(failures[0]))

    def _failures(self, names: list[str]) -> list[RankFailure]:
        said = self._board.get([name for name in names if self._board.has(name)])
        return [RankFailure.from_json(text) for text in said if text]

    def failure_of(self, error: BaseException) -> RankFailure:
        """What an error on this process means for the run.

        A broken connection is mostly another process's death, which the watch finds out about: wait for it to.
        """
        if _is_of_transport(error):
            if "timed out" in str(error).lower() and (
                blamed := self._watch.find_stalled_rank(self._collective_seconds)
            ):
                return blamed
            # The watch ends this wait with RunEnded, in the main thread, as soon as it knows.
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
                if (ending := self._board.ending()) is not None:
                    raise RunEnded(ending)
                time.sleep(0.1)
        except dist.DistError:
            self._watch.report_store_lost()
            raise

    def end(self, failure: RankFailure) -> RankFailure:
        """End the run on all processes; returns why it ended, which another process may have said before."""
        return self._watch.end(failure)

    def end_unreported(self, failure: RankFailure) -> None:
        """The same for a reason that the user has been told already."""
        self._board.end(failure)

    def ending(self) -> RankFailure | None:
        """Why the run ends, once somebody has said it."""
        return self._board.ending()

    def leave(self) -> None:
        """The orderly end, after a last `agree`. The first process goes last: where no launcher of torch's keeps the
        store, it stands in that process."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._watch.stop()
        if not self.is_first:
            self._board.set(f"left/{self.place.rank}", "")
            return
        deadline = time.monotonic() + SILENT_SECONDS
        others = [f"left/{rank}" for rank in range(1, self.size)]
        self._board.wait(others, give_up=lambda: time.monotonic() >= deadline or self._board.ending() is not None)

    def leave_failed(self, failure: RankFailure) -> None:
        """End the run on the others because of `failure`; this process goes on, to end in its own way."""
        # Else the watchdog would end it, as it does the others.
        self._watch.stop()
        self.end(failure)
        if self.is_first and self.size > 1 and not self.place.has_agent:
            # The store stands in this process: the others need a moment to read why.
            time.sleep(4 * BEAT_SECONDS)


class _Patience:
    """Seconds from when something is first seen; it is looked for twice a second."""

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
    """An error as the end of a run."""
    trace = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    if isinstance(error, DiffusionRuntimeError):
        return RankFailure(rank, kind, str(error), error.exit_code, trace)
    return RankFailure(rank, kind, f"rank {rank}: unexpected {kind}: {first_line(error)}", 1, trace)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _is_of_transport(error: BaseException) -> bool:
    """Whether the error comes from moving data between processes: gloo raises bare RuntimeErrors."""
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
