"""A command as one of several processes: join the others, stay quiet unless it is this one's turn, end with them."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from diffusion_runtime.cli.coordinator import MultiProcessCoordinator
from diffusion_runtime.cli.failures import INTERRUPTED, Failure, Interrupted
from diffusion_runtime.cli.interruptions import interruptions, remove_unfinished_files
from diffusion_runtime.cli.terminal import Terminal, put_failure_on_stdout
from diffusion_runtime.parallel.failure import RankFailure, RunEnded
from diffusion_runtime.parallel.orphans import end_with_launcher
from diffusion_runtime.parallel.process_info import ProcessInfo

if TYPE_CHECKING:
    from diffusion_runtime.parallel.world import World

# An interrupted process waits so long for the first one to say what was finished: it may be in the middle of a step.
_SECONDS_TO_BE_TOLD = 5.0
# A process that is told to end without a word looks this long for the reason, which another one may be saying.
_SECONDS_TO_LEARN_WHY = 2.0

Work = Callable[[MultiProcessCoordinator, Terminal], int]


class RankRunner:
    """One process of a run. schema: of the JSON object that a failure is said as, None for text alone."""

    def __init__(self, place: ProcessInfo, terminal: Terminal, schema: str | None) -> None:
        self._place = place
        # Whose fault it was is said by whoever finds out; everything else by the first process.
        self._stderr = terminal
        self._terminal = terminal if place.is_first else Terminal(quiet=True, silent=True)
        self._schema = schema
        self._is_announcing = False

    def run(self, work: Work) -> NoReturn:
        """Do `work` together with the other processes, and end the process with the exit code that all have."""
        if not self._stderr.verbose:
            # torch's C++ code says on standard error whatever it also raises. Read when torch is loaded.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        end_with_launcher(self._place)
        signal.signal(signal.SIGTERM, self._end_quietly)
        if self._place.is_launched or not self._place.is_first:
            interruptions.leave_saying_to_others()
        world: World | None = None
        code: int | None = None
        try:
            from diffusion_runtime.parallel.world import World

            world = World.join(self._place, announce=self._announce, describe=_describe)
            with self._terminal.log():
                code = work(MultiProcessCoordinator(world), self._terminal)
            if code == INTERRUPTED:
                code = self._end_interrupted(world, is_reported=True)
            else:
                world.agree(None)
                world.leave()
                self._record_what_was_said(code)
        except KeyboardInterrupt as error:
            # Once the work is done all is said, and a late interruption has nothing to add.
            code = self._fail(error, world) if code is None else code
        except BaseException as error:
            code = self._fail(error, world)
        self._exit(code)

    def _fail(self, error: BaseException, world: World | None) -> int:
        """Say why the run ends, unless another process does; returns the exit code."""
        try:
            if isinstance(error, RunEnded):
                ending = error.failure or self._learn_why(world)
                return self._end_interrupted(world) if ending is None else ending.exit_code
            if isinstance(error, KeyboardInterrupt):
                return self._end_interrupted(world)
            if world is None:
                failure = _describe(self._place.rank, error)
                self._announce(failure)
                return failure.exit_code
            return world.end(world.failure_of(error)).exit_code
        except BaseException as second:  # told to end while it was finding out why
            if isinstance(second, RunEnded) and second.failure is not None:
                return second.failure.exit_code
            ending = self._learn_why(world)
            return 1 if ending is None else ending.exit_code

    def _learn_why(
        self, world: World | None, seconds: float = _SECONDS_TO_LEARN_WHY, *, by_signal: bool = True
    ) -> RankFailure | None:
        """Why the run ends, if another process says so within `seconds`. by_signal: this one was told to end."""
        deadline = time.monotonic() + seconds
        try:
            while world is not None and time.monotonic() < deadline:
                if (ending := world.ending()) is not None:
                    return ending
                # Our own launcher ends its processes with SIGTERM for one reason alone, and says it.
                if by_signal and self._place.is_launched:
                    return RankFailure(self._place.rank, "", "", 1)
                time.sleep(0.1)
        except RuntimeError:
            # The run store ended with its launcher.
            return RankFailure(self._place.rank, "", "", 1)
        return None

    def _end_interrupted(self, world: World | None, *, is_reported: bool = False) -> int:
        """End the run, as an interrupted process may have left others in the middle of a collective.

        The first process says what was finished. is_reported: it has. Another one reports only if it alone was
        interrupted.
        """
        if self._place.is_first:
            failure = RankFailure.of_interruption(Failure.of(Interrupted()).message)
            if not is_reported:
                with interruptions.saying():
                    self._announce(failure, is_reported=True)
            self._record_what_was_said(INTERRUPTED)
            if world is not None:
                world.end_silently(failure)
            return INTERRUPTED
        if self._learn_why(world, _SECONDS_TO_BE_TOLD, by_signal=False) is None:
            rank = self._place.rank
            failure = RankFailure(rank, Interrupted.__name__, f"rank {rank}: this process alone was interrupted", 130)
            if world is None:
                self._announce(failure)
            else:
                world.end(failure)
        return INTERRUPTED

    def _announce(self, failure: RankFailure, *, is_reported: bool = False) -> None:
        """Tell the user, or the launcher who will. It may be called in the watch's thread."""
        self._is_announcing = True
        if is_reported or not self._place.is_launched:
            report_failure(self._stderr, failure, self._schema)
            # torchrun shows what stands in this file at the end.
            failure = dataclasses.replace(failure, message="said above", trace="said above", is_reported=True)
        if self._place.error_file is not None:
            failure.write(self._place.error_file)
        self._is_announcing = False

    def _record_what_was_said(self, code: int) -> None:
        """For the launcher: this exit code needs no further word."""
        if code and self._place.error_file is not None:
            RankFailure(self._place.rank, "", "said above", code, is_reported=True).write(self._place.error_file)

    def _end_quietly(self, *_: object) -> None:
        if not self._is_announcing:
            raise RunEnded

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


def report_failure(terminal: Terminal, failure: RankFailure, schema: str | None) -> None:
    """One message on standard error and, where results are JSON, one object on standard output."""
    terminal.error(failure.message, failure.trace)
    if schema is not None:
        said = {"error": failure.message, "kind": failure.kind, "exit_code": failure.exit_code}
        put_failure_on_stdout(schema, said)


def _describe(rank: int, error: BaseException) -> RankFailure:
    """An error as a user sees it. What is wrong with the command is wrong on every rank, and none is named."""
    failure = Failure.of(error)
    from diffusion_runtime.errors import BackendUnavailableError, UsageError

    is_everybodys = isinstance(error, UsageError | BackendUnavailableError)
    message = failure.message if is_everybodys else f"rank {rank}: {failure.message}"
    return RankFailure(rank, failure.kind, message, failure.exit_code, failure.trace)
