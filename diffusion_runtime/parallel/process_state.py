"""What the system says of other processes on this host: whether they run, compute, read and write. Linux's /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class ProcessState:
    """code: the letter of proc(5). seconds: what all threads have computed; num_bytes: read from and written to disks
    and files, 0 where it may not be known."""

    code: str
    seconds: float
    num_bytes: int

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP, or by a debugger."""
        return self.code in ("T", "t")

    @property
    def is_dead(self) -> bool:
        """It has ended, and its parent has not asked yet."""
        return self.code in ("Z", "X", "x")

    @property
    def reads_disk(self) -> bool:
        """It waits for a disk, and cannot be interrupted."""
        return self.code == "D"


def read_state(process: int | str) -> ProcessState | None:
    """Of a process by its number, or of "self"; None when there is no such process, or no /proc."""
    try:
        fields = _stat_fields(process)
    except (OSError, IndexError):
        return None
    return ProcessState(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND, _num_bytes(process))


def is_alive(process: int) -> bool:
    """Whether a process with this number runs or can go on; one that has ended is not alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = read_state(process)
    return state is None or not state.is_dead


def children_of(parent: int) -> list[int]:
    """The processes that `parent` has started and that have not ended; none where there is no /proc."""
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
    """A variable of the environment that a process was started with; None when that is not known."""
    try:
        pairs = (_PROC / str(process) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = os.fsencode(name) + b"="
    return next((os.fsdecode(pair[len(start) :]) for pair in pairs if pair.startswith(start)), None)


def _stat_fields(process: int | str) -> list[str]:
    """From the state on: the name before it may hold spaces and brackets."""
    return (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _num_bytes(process: int | str) -> int:
    try:
        lines = (_PROC / str(process) / "io").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(": ") for line in lines)
    return sum(int(numbers.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
