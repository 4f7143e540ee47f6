"""Memory of a model that is no longer used, given back to the device."""

from __future__ import annotations

import gc

import torch


def release_device_memory(device: torch.device) -> None:
    """Empty torch's cache of blocks that nothing uses any more."""
    # Modules hold each other in circles.
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
