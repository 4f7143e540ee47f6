"""Liveness of another rank: from its heartbeat, and on the same host from /proc as well.

The heartbeat comes from a Python thread, which cannot run while the main thread holds the interpreter lock (a compiler,
a long conversion). A missing heartbeat alone is therefore no proof where /proc can be read.
"""

from __future__ import annotations

from diffusion_runtime.parallel.process_state import ProcessState, is_alive, read_state

# A process that has been stopped for longer than this counts as lost.
STOPPED_SECONDS = 15.0
# No heartbeat, and no activity in /proc or no /proc. The process may wait for a disk or for another program while it
# holds the interpreter lock.
SILENT_SECONDS = 45.0
# For processes on other hosts without a first heartbeat: they may still be importing from a cold disk.
MEETING_SECONDS = 300.0


class SignsOfLife:
    """Liveness of one other rank, polled repeatedly."""

    def __init__(self) -> None:
        self._count = -1
        self._since: float | None = None
        self._state: ProcessState | None = None

    def forget(self) -> None:
        """Restart the timer: the observing process was suspended."""
        self._since = None

    def look(self, count: int | None, process: int | None, now: float) -> str | None:
        """How the rank was lost, as the end of a sentence; None while it may be alive.

        count: its heartbeats so far, None for none. process: its process id on this host, None on another. now: in
        seconds. The caller knows whether a process that has ended did so in order.
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
        what = "has not joined the others" if count is None else "has sent no heartbeat"
        return f"{what} for {silent_seconds:.0f} s" + ("" if state is None else ", and has used no CPU time")


def _has_worked(before: ProcessState | None, now: ProcessState | None) -> bool:
    if before is None or now is None:
        return False
    return now.seconds > before.seconds or now.num_bytes > before.num_bytes or now.reads_disk
