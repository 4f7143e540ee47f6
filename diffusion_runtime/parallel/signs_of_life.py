"""Whether another process of the run still lives: by what it says, and on the same host by what the system says of it.

A process says that it lives in a thread of Python's, which gets no turn while the main thread is in a call that keeps
the interpreter (a compiler, a long conversion). So silence alone proves nothing where the system can be asked.
"""

from __future__ import annotations

from diffusion_runtime.parallel.process_state import ProcessState, is_alive, read_state

# A process that has been stopped for so long is not waited for.
STOPPED_SECONDS = 15.0
# Silent, and the system does not know of it, or knows that it does nothing. It may be in a call that waits for a disk
# or for another program, and keeps the interpreter meanwhile.
SILENT_SECONDS = 45.0
# Processes on other hosts that have not said anything yet: they may still be importing from a cold disk.
MEETING_SECONDS = 300.0


class SignsOfLife:
    """Of one other process, which is looked at again and again."""

    def __init__(self) -> None:
        self._count = -1
        self._since: float | None = None
        self._state: ProcessState | None = None

    def forget(self) -> None:
        """Start anew: the one who looks has slept."""
        self._since = None

    def look(self, count: int | None, process: int | None, now: float) -> str | None:
        """How it was lost, as the end of a sentence; None while it may live.

        count: how often it has said that it lives, None for never. process: its number on this host, None elsewhere.
        now: in seconds. The caller knows whether one that has ended did so in order.
        """
        if process is not None and not is_alive(process):
            return "is gone: it was killed or crashed"
        state = None if process is None else read_state(process)
        has_worked = _has_worked(self._state, state)
        if self._since is None or has_worked or (count is not None and count != self._count):
            self._since = now
        self._state, self._count = state, -1 if count is None else count
        silent_seconds = now - self._since
        if state is not None and state.is_stopped:
            return f"has been stopped for {silent_seconds:.0f} s" if silent_seconds >= STOPPED_SECONDS else None
        longest = MEETING_SECONDS if count is None and state is None else SILENT_SECONDS
        if silent_seconds < longest:
            return None
        what = "has not joined the others" if count is None else "has given no sign of life"
        return f"{what} for {silent_seconds:.0f} s" + ("" if state is None else ", in which it computed nothing")


def _has_worked(before: ProcessState | None, now: ProcessState | None) -> bool:
    if before is None or now is None:
        return False
    return now.seconds > before.seconds or now.num_bytes > before.num_bytes or now.reads_disk
