"""Amounts of memory: free on a device, free in the machine, and the peak of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_on_device(device: torch.device) -> int | None:
    """Bytes that this process can still take on a device, with what torch's allocator holds unused; None for a device
    that does not report it."""
    if device.type == "cpu":
        return free_in_machine()
    library, share = _library_of(device), share_of_device(device)
    return None if library is None or share is None else share - int(library.memory_allocated(device))


def share_of_device(device: torch.device) -> int | None:
    """Bytes of a device that are this process's or free: what it could have if it gave back all of its own; None for
    one that does not report it, and for the machine's own memory."""
    library = _library_of(device)
    if library is None:
        return None
    try:
        free, _ = library.mem_get_info(device)
    except RuntimeError:
        # Some Intel drivers do not report it.
        if device.type == "cuda":
            raise
        return None
    return int(free) + int(library.memory_reserved(device))


def _library_of(device: torch.device) -> Any:
    """torch's module of a kind of device that counts what is allocated; None for the CPU and MPS, whose memory is the
    machine's."""
    return {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)


def free_in_machine() -> int | None:
    """Bytes that programs can take without swapping, as the kernel counts them, within the limit of this process's
    container; None where it does not."""
    found = [each for each in (_kibibytes(_MEMINFO, "MemAvailable:"), _free_in_container()) if each is not None]
    return min(found, default=None)


def peaks(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process had at once: `machine`, and `device` for tensors on a GPU that counts."""
    found, library = {"machine": peak_in_machine()}, _library_of(device)
    if library is not None:
        found["device"] = int(library.max_memory_allocated(device))
    return found


def forget_device_peak(device: torch.device) -> None:
    """`peaks` counts tensors on the device from here on. The machine's part stays that of the whole process."""
    library = _library_of(device)
    if library is not None:
        library.reset_peak_memory_stats(device)


def peak_in_machine() -> int:
    """Return the most bytes of this process that were in memory at once so far, pages of mapped files included."""
    # getrusage's begins with that of the program that started this one, where exec kept the process.
    own = _kibibytes(_STATUS, "VmHWM:")
    if own is not None:
        return own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux kibibytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _free_in_container() -> int | None:
    """Return what the limit of a container (control group, version 2 or 1) leaves, or None without one. Past it the
    kernel kills the process, and /proc/meminfo describes the whole machine."""
    for limit, used, of_files in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        most, taken = (_text(_CONTROL_GROUP / name).strip() for name in (limit, used))
        if not (most.isdecimal() and taken.isdecimal()):
            continue
        rows = [line.split() for line in _text((_CONTROL_GROUP / limit).with_name("memory.stat")).splitlines()]
        # Pages of files count as taken, and are given up when they are needed.
        files = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in of_files)
        return max(0, int(most) - int(taken) + files)
    return None


def _text(path: Path) -> str:
    """Return the text of a kernel file, empty if it does not exist."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _kibibytes(path: Path, key: str) -> int | None:
    """Bytes of a line such as `VmHWM: 1024 kB` of a file of the kernel's; None where it has none."""
    return next((int(line.split()[1]) * 1024 for line in _text(path).splitlines() if line.startswith(key)), None)
