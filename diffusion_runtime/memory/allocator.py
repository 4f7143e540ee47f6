"""torch's allocator on CUDA: segments that grow, so that any tensor can have all that is free."""

from __future__ import annotations

import os
import sys

import torch

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
