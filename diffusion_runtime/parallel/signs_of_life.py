"""Liveness of another rank: from its heartbeat, and on the same host from its process state in /proc as well.

The heartbeat comes from a Python thread, which cannot run while the main thread holds the interpreter lock (a compiler,
a long conversion). A missing heartbeat alone is therefore no proof where /proc can be read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class ProcessState:
    """code: the state letter of proc(5). seconds: CPU time of all threads; num_bytes: read from and written to disks
    and files, 0 where that is not readable."""

    code: str
    seconds: float
    num_bytes: int

    @property
    def is_stopped(self) -> bool:
        """Stopped by SIGSTOP or by a debugger."""
        return self.code in ("T", "t")

    @property
    def is_dead(self) -> bool:
        """A zombie: it has ended, and its parent has not waited for it yet."""
        return self.code in ("Z", "X", "x")

    @property
    def reads_disk(self) -> bool:
        """In uninterruptible disk sleep."""
        return self.code == "D"


def read_state(process: int | str) -> ProcessState | None:
    """State of a process by its id, or of "self"; None when there is no such process, or no /proc."""
    try:
        fields = _stat_fields(process)
    except (OSError, IndexError):
        return None
    return ProcessState(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND, _num_bytes(process))


def is_alive(process: int) -> bool:
    """Return True if a process with this id exists and is no zombie."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = read_state(process)
    return state is None or not state.is_dead


def children_of(parent: int) -> list[int]:
    """Return the running child processes of `parent`; none where there is no /proc."""
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdecimal():
            try:
                fields = _stat_fields(entry.name)
            except (OSError, IndexError):
                continue
            if int(fields[1]) == parent and fields[0] not in "ZXx":
                found.append(int(entry.name))
    return found


def variable_of(process: int, name: str) -> str | None:
    """Return a variable of a process's initial environment, or None when that is not readable."""
    try:
        pairs = (_PROC / str(process) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = os.fsencode(name) + b"="
    return next((os.fsdecode(pair[len(start) :]) for pair in pairs if pair.startswith(start)), None)


def _stat_fields(process: int | str) -> list[str]:
    """Return the fields from the state on: the name before it may hold spaces and brackets."""
    return (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _num_bytes(process: int | str) -> int:
    try:
        lines = (_PROC / str(process) / "io").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(": ") for line in lines)
    return sum(int(numbers.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


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
        """Return how the rank was lost, as the end of a sentence, or None while it may be alive.

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
