"""Device memory: out-of-memory (OOM) errors as DeviceMemoryError with advice, memory released after use, and torch's
allocator on CUDA with segments that grow."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator

import torch

from diffusion_runtime.errors import DeviceMemoryError

# torch raises a plain RuntimeError for these two.
_PHRASES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "out of memory")


@contextlib.contextmanager
def explain_memory_shortage(doing: str, advice: str | Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error inside the block, of the CPU or of an accelerator, into DeviceMemoryError.

    doing: what was being done, such as `loading the transformer`; advice: what needs less memory, or what finds it out
    when it is needed.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _shortage(error, doing, advice) from error
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in _PHRASES):
            raise
        raise _shortage(error, doing, advice) from error


def _shortage(error: BaseException, doing: str, advice: str | Callable[[], str]) -> DeviceMemoryError:
    detail = (str(error).strip().splitlines() or ["no further detail"])[0]
    return DeviceMemoryError(
        f"not enough memory while {doing}: {detail}. {advice if isinstance(advice, str) else advice()}"
    )


def num_shortages(device: torch.device) -> int:
    """Allocations of this process that a device refused so far, those that a library did without included."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0


def shortage_remark(device: torch.device) -> str | None:
    """Return a remark that convolutions may have computed otherwise for want of memory, or None if no request was
    refused.

    cuDNN takes the next of its algorithms where the workspace of its first choice does not fit, without a word, and
    stays with it for convolutions of that shape: other sums, in up to twice the time.
    """
    count = num_shortages(device)
    if count == 0:
        return None
    return (
        f"this process asked the device {count} times for memory that was not there: convolutions of the decoder may "
        "take other algorithms since, with frames that differ in their last bits, and slower; a larger --memory-limit, "
        "or fewer other programs on the device, and a new process avoid it"
    )


def release_device_memory(device: torch.device) -> None:
    """Empty torch's allocator cache: blocks that nothing uses any more go back to the device."""
    # Modules hold each other in reference cycles.
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


# torch reads both; the first is the newer name.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments(device: torch.device) -> bool:
    """Let the allocator of `device` grow its segments (`expandable_segments`) from now on; whether it does.

    Segments of a fixed size are split between tensors, and what is free in many of them serves no tensor larger than
    the largest piece. A plan counts live tensors: without this a forward pass of Wan 14B that has 11.0 GB alive ran out
    of 11.5 GB at the 0.86 GB of one feed-forward layer (H200, torch 2.11). A setting of one's own in PYTORCH_ALLOC_CONF
    or PYTORCH_CUDA_ALLOC_CONF is left as it is. Linux and NVIDIA alone: torch has it nowhere else.
    """
    if device.type != "cuda" or torch.version.hip is not None or sys.platform != "linux":
        return False
    if any("expandable_segments" in text or "backend" in text for text in map(_setting, _VARIABLES)):
        return False
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:
        change = torch.cuda.memory._set_allocator_settings
    # Alone: a call replaces the values of the variables.
    change(",".join([*(text for text in map(_setting, _VARIABLES) if text), "expandable_segments:True"]))
    return True


def _setting(variable: str) -> str:
    return os.environ.get(variable, "")
