"""Rank runner: a program as one of several processes joins the others, reports failures once, and ends with them."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from diffusion_runtime.parallel.failure import RankFailure, RunEnded
from diffusion_runtime.parallel.process_info import TERMINATED, ProcessInfo, end_with_launcher
from diffusion_runtime.session.coordinator import MultiProcessCoordinator
from diffusion_runtime.session.failures import INTERRUPTED, Failure, Interrupted, with_kept_frames
from diffusion_runtime.session.interruptions import interruptions, remove_unfinished_files

if TYPE_CHECKING:
    from diffusion_runtime.parallel.world import World

# How long an interrupted rank waits for rank 0 to report what was finished: rank 0 may be in the middle of a step. With
# our own launcher, which reports where no rank does and kills what is left after 2.5 s, no longer than that allows.
_SECONDS_FOR_RANK_0 = 5.0
_SECONDS_FOR_RANK_0_LAUNCHED = 1.0
# How long a rank that got SIGTERM looks for the reason, which another rank may be reporting.
_SECONDS_TO_LEARN_WHY = 2.0
# After which a SIGTERM that was lost is sent again: the finalizer that lost it has returned by then.
_SECONDS_TO_RESEND = 0.05

Work = Callable[[MultiProcessCoordinator], int]


class RankRunner:
    """One process of a run. report: tells the user why the run failed, on the process that finds out. verbose: torch's
    C++ code may log."""

    def __init__(
        self, process_info: ProcessInfo, report: Callable[[RankFailure], None], *, verbose: bool = False
    ) -> None:
        self._process_info = process_info
        self._report = report
        self._verbose = verbose
        self._world: World | None = None
        self._coordinator: MultiProcessCoordinator | None = None
        self._is_announcing = False
        self._is_ending = False

    def run(self, work: Work) -> NoReturn:
        """Do `work` on this rank, and end the process with the exit code that all ranks have."""
        if not self._verbose:
            # torch's C++ code logs on standard error whatever it also raises. Read when torch is loaded.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        end_with_launcher(self._process_info)
        sys.unraisablehook = self._end_despite
        if self._process_info.is_launched or not self._process_info.is_first:
            interruptions.leave_reporting_to_others()
        world: World | None = None
        code: int | None = None
        try:
            # Inside, and SIGTERM never as Ctrl-C: it may come at any time, and means that another rank has failed.
            interruptions.install(on_terminate=self._end_quietly)
            from diffusion_runtime.parallel.world import World

            world = self._world = World.join(self._process_info, announce=self._announce, describe=_describe)
            self._coordinator = MultiProcessCoordinator(world)
            code = work(self._coordinator)
            if code == INTERRUPTED:
                code = self._end_interrupted(world, is_reported=True)
            else:
                world.agree(None)
                world.leave()
                self._record_as_reported(code)
        except KeyboardInterrupt as error:
            # The work is done and reported; a late interruption has nothing to add.
            code = self._fail(error, world) if code is None else code
        except BaseException as error:
            code = self._fail(error, world)
        self._exit(code)

    def _fail(self, error: BaseException, world: World | None) -> int:
        """Report why the run ends, unless another process does; returns the exit code."""
        try:
            if isinstance(error, RunEnded):
                ending = error.failure or self._learn_why(world)
                if ending is None and (world is None or not world.has_met):
                    # SIGTERM before the ranks have met: another one has failed, and its launcher reports it.
                    return TERMINATED
                return self._end_interrupted(world) if ending is None else ending.exit_code
            if isinstance(error, KeyboardInterrupt):
                return self._end_interrupted(world)
            if world is None:
                failure = _describe(self._process_info.rank, error)
                self._announce(failure)
                return failure.exit_code
            return world.end(world.failure_of(error)).exit_code
        except BaseException as second:  # a signal while it looks for the reason
            if isinstance(second, RunEnded) and second.failure is not None:
                return second.failure.exit_code
            ending = self._learn_why(world)
            return 1 if ending is None else ending.exit_code

    def _learn_why(
        self, world: World | None, seconds: float = _SECONDS_TO_LEARN_WHY, *, by_signal: bool = True
    ) -> RankFailure | None:
        """Return why the run ends if another process reports it within `seconds`. by_signal: this one got SIGTERM."""
        deadline = time.monotonic() + seconds
        try:
            while world is not None and time.monotonic() < deadline:
                if (ending := world.ending()) is not None:
                    return ending
                # Our own launcher ends its processes with SIGTERM for one reason alone, and reports it. Where another
                # program sent it, this rank is the first to end, and the launcher knows by the exit code of what.
                if by_signal and self._process_info.is_launched:
                    return RankFailure(self._process_info.rank, "", "", TERMINATED)
                time.sleep(0.1)
        except RuntimeError:
            # The run store ended with its launcher.
            return RankFailure(self._process_info.rank, "", "", 1)
        return None

    def _end_interrupted(self, world: World | None, *, is_reported: bool = False) -> int:
        """End the run, as an interrupted process may have left others in the middle of a collective.

        Rank 0 reports what was finished. is_reported: it has. Another one reports only if it alone was
        interrupted.
        """
        if self._process_info.is_first:
            failure = RankFailure.of_interruption(Failure.of(Interrupted()).message)
            if not is_reported:
                with interruptions.reporting():
                    self._announce(failure, is_reported=True)
            self._record_as_reported(INTERRUPTED)
            if world is not None:
                world.end_unreported(failure)
            return INTERRUPTED
        seconds = _SECONDS_FOR_RANK_0_LAUNCHED if self._process_info.is_launched else _SECONDS_FOR_RANK_0
        if self._learn_why(world, seconds, by_signal=False) is None:
            rank = self._process_info.rank
            failure = RankFailure(rank, Interrupted.__name__, f"rank {rank}: this process alone was interrupted", 130)
            if world is None:
                self._announce(failure)
            else:
                world.end(failure)
        return INTERRUPTED

    def _announce(self, failure: RankFailure, *, is_reported: bool = False) -> None:
        """Report to the user, or to the launcher, which does. It may be called in the watchdog's thread."""
        self._is_announcing = True
        if is_reported or not self._process_info.is_launched:
            growing = None if self._coordinator is None else self._coordinator.growing_file
            self._report(failure if growing is None or is_reported else with_kept_frames(failure, growing))
            # torchrun shows what stands in this file at the end.
            failure = dataclasses.replace(failure, message="reported above", trace="reported above", is_reported=True)
        if self._process_info.error_file is not None:
            failure.write(self._process_info.error_file)
        self._is_announcing = False

    def _record_as_reported(self, code: int) -> None:
        """Record for the launcher that the failure behind this exit code was reported."""
        if code and self._process_info.error_file is not None:
            RankFailure(self._process_info.rank, "", "reported above", code, is_reported=True).write(
                self._process_info.error_file
            )

    def _end_quietly(self, *_: object) -> None:
        # The watchdog and the launcher may both send SIGTERM: a second RunEnded while the first unwinds would leave a
        # traceback. A thread that reports why the run ends, ends this process afterwards.
        is_reporting = self._is_announcing or (self._world is not None and self._world.is_reporting)
        if not is_reporting and not self._is_ending:
            self._is_ending = True
            raise RunEnded

    def _end_despite(self, unraisable: Any) -> None:
        """Send the signal again, without traceback, if a finalizer raised RunEnded, which is lost there."""
        if not isinstance(unraisable.exc_value, RunEnded):
            sys.__unraisablehook__(unraisable)
            return
        self._is_ending = False
        resend = threading.Timer(_SECONDS_TO_RESEND, os.kill, (os.getpid(), signal.SIGTERM))
        resend.daemon = True
        resend.start()

    def _exit(self, code: int) -> NoReturn:
        # What is left are threads of torch that may wait for processes that are gone.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        remove_unfinished_files()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(code)


def _describe(rank: int, error: BaseException) -> RankFailure:
    """Describe an error as a user sees it. A fault of the command is the same on every rank, and none is named."""
    failure = Failure.of(error)
    from diffusion_runtime.errors import BackendUnavailableError, UsageError

    is_everybodys = isinstance(error, UsageError | BackendUnavailableError)
    message = failure.message if is_everybodys else f"rank {rank}: {failure.message}"
    return RankFailure(rank, failure.kind, message, failure.exit_code, failure.trace)
