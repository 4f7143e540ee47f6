"""State of other processes on this host, from Linux's /proc: whether they run, and how much they compute, read and
write."""

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
    """Whether a process with this id exists and is no zombie."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = read_state(process)
    return state is None or not state.is_dead


def children_of(parent: int) -> list[int]:
    """The running child processes of `parent`; none where there is no /proc."""
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
    """A variable of a process's initial environment; None when that is not readable."""
    try:
        pairs = (_PROC / str(process) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = os.fsencode(name) + b"="
    return next((os.fsdecode(pair[len(start) :]) for pair in pairs if pair.startswith(start)), None)


def _stat_fields(process: int | str) -> list[str]:
    """The fields from the state on: the name before it may hold spaces and brackets."""
    return (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _num_bytes(process: int | str) -> int:
    try:
        lines = (_PROC / str(process) / "io").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(": ") for line in lines)
    return sum(int(numbers.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
