"""Signal handlers for SIGINT (Ctrl-C), SIGTERM and SIGHUP (a terminal that is closed): the first signal ends the run in
order, a second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from diffusion_runtime.session.failures import INTERRUPTED

_LINE = b"error: interrupted twice: ended at once, files that were not finished are gone\n"


class Interruptions:
    """The signal handlers of this process, from `install` on."""

    def __init__(self) -> None:
        self._num_signals = 0
        self._is_reporting = False
        self._is_reported = False
        self._exit_code: int | None = None

    def install(self, on_terminate: Callable[..., None] | None = None) -> None:
        """Handle SIGINT, and SIGTERM and SIGHUP like it: finished outputs stay, partial files are removed. A SIGHUP
        that is ignored, as under nohup, stays so. on_terminate: handles SIGTERM instead."""
        signal.signal(signal.SIGTERM, self.handle if on_terminate is None else on_terminate)
        signal.signal(signal.SIGINT, self.handle)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.handle)

    def install_in_starting_rank(self, *, is_launched: bool) -> None:
        """Install the handlers in one rank of a run that has not met the others: SIGTERM means that another one has
        failed, which that one reports. is_launched: our own launcher reports interruptions too. This one ends without a
        message."""
        signal.signal(signal.SIGINT, self._end_quietly if is_launched else self.handle)
        signal.signal(signal.SIGTERM, self._end_quietly)

    def handle(self, *_: object) -> None:
        """Handle a signal. Raises KeyboardInterrupt for the first one."""
        self._num_signals += 1
        if self._exit_code is not None:
            self._end(self._exit_code)
        if self._num_signals == 1:
            raise KeyboardInterrupt
        if not self._is_reporting:
            self.end_at_once()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Context manager: the block reports that the run was interrupted; a second signal waits until it has."""
        self._is_reporting = True
        try:
            yield
        finally:
            self._is_reported, self._is_reporting = True, False
            if self._num_signals > 1:
                self.end_at_once()

    @property
    def is_reported(self) -> bool:
        """Return whether somebody has said, or will say, that the run was interrupted."""
        return self._is_reported

    def all_is_reported(self, exit_code: int) -> None:
        """Let a signal from now on end the process with this code and no message."""
        self._exit_code = exit_code

    def leave_reporting_to_others(self) -> None:
        """Leave the report of interruptions to another process of the run; this one prints nothing."""
        self._is_reported = True

    def end_at_once(self) -> None:
        """End as a second signal does: with one line, unless it was reported, and without unwinding."""
        if not self._is_reported:
            with contextlib.suppress(OSError):
                os.write(2, _LINE)
        self._end(INTERRUPTED)

    def _end_quietly(self, number: int, _: object) -> None:
        self._end(INTERRUPTED if number == signal.SIGINT else 1)

    def _end(self, exit_code: int) -> None:
        remove_unfinished_files()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        # Unwinding takes time, and may be interrupted again.
        os._exit(exit_code)


def remove_unfinished_files() -> None:
    """Remove the temporary files of this process."""
    # Nothing is imported for it: where the module is missing, no file was begun.
    publish = sys.modules.get("diffusion_runtime.media.publish")
    if publish is not None:
        publish.remove_own_temporary_files()


# One for the process, as its signal handlers are.
interruptions = Interruptions()
