"""What there is of memory: free on a device, free in the machine, and the most that this process had."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def free_on_device(device: torch.device) -> int | None:
    """Bytes that this process can still take on a device, with what torch's allocator holds unused; None for a device
    that does not say."""
    if device.type == "cpu":
        return free_in_machine()
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def total_on_device(device: torch.device) -> int | None:
    """Bytes of a device, whoever has them; None for one that does not say, and for the machine's own memory."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def free_in_machine() -> int | None:
    """Bytes that programs can take without swapping, as the kernel counts them; None where it does not."""
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def peaks(device: torch.device) -> dict[str, int]:
    """The most bytes that this process had at once so far: `machine`, and `device` for tensors on a CUDA device."""
    found = {"machine": peak_in_machine()}
    if device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated(device)
    return found


def peak_in_machine() -> int:
    """The most bytes of this process that were in memory at once so far, pages of mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux kibibytes.
    return peak if sys.platform == "darwin" else peak * 1024
