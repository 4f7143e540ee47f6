"""Ctrl-C and SIGTERM: the first one ends what runs in order, a second one the process at once, with one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from diffusion_runtime.session.failures import INTERRUPTED

_LINE = b"error: interrupted twice: ended at once, files that were not finished are gone\n"


class Interruptions:
    """What signals mean to this process, from `install` on. Handlers belong to a process, and so does this."""

    def __init__(self) -> None:
        self._num_signals = 0
        self._is_saying = False
        self._is_said = False
        self._exit_code: int | None = None

    def install(self) -> None:
        signal.signal(signal.SIGINT, self.handle)
        # A polite kill ends like Ctrl-C does: finished items stay, unfinished files go.
        signal.signal(signal.SIGTERM, self.handle)

    def handle(self, *_: object) -> None:
        """The handler. Raises KeyboardInterrupt for the first signal."""
        self._num_signals += 1
        if self._exit_code is not None:
            self._end(self._exit_code)
        if self._num_signals == 1:
            raise KeyboardInterrupt
        if not self._is_saying:
            self.end_at_once()

    @contextlib.contextmanager
    def saying(self) -> Iterator[None]:
        """The block says that the run was interrupted; a second signal waits for it, and has nothing to add."""
        self._is_saying = True
        try:
            yield
        finally:
            self._is_said, self._is_saying = True, False
            if self._num_signals > 1:
                self.end_at_once()

    def all_is_said(self, exit_code: int) -> None:
        """Whatever comes now ends the process with this code, without a word."""
        self._exit_code = exit_code

    def leave_saying_to_others(self) -> None:
        """This process is one of several, and another one speaks."""
        self._is_said = True

    def end_at_once(self) -> None:
        """What a second signal does: one line, unless it is said, and no unwinding."""
        if not self._is_said:
            with contextlib.suppress(OSError):
                os.write(2, _LINE)
        self._end(INTERRUPTED)

    def _end(self, exit_code: int) -> None:
        remove_unfinished_files()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        # Unwinding takes time, and whoever unwinds may be interrupted again.
        os._exit(exit_code)


def remove_unfinished_files() -> None:
    """What this process was writing, if it has come that far."""
    # Nothing is imported for it: where the module is missing, no file was begun.
    publish = sys.modules.get("diffusion_runtime.media.publish")
    if publish is not None:
        publish.remove_own_temporary_files()


# One for the process, as its signal handlers are.
interruptions = Interruptions()
