"""Versions: what besides the recipe decides the bits of a result on one machine."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from diffusion_runtime.core.hardware import detect_hardware

# Distributions whose code computes or writes frames.
_DISTRIBUTIONS = ("torch", "diffusers", "transformers", "pillow")


def made_with(device: str) -> dict[str, Any]:
    """Return versions by name, and what of the processor a library chooses its kernels by: on a CPU its instructions
    and the number of threads, which changes the order of sums; else the chip. device: as torch names it."""
    import torch

    hardware = detect_hardware(device)
    is_cpu = hardware.platform == "cpu"
    chip = {"instructions": torch.backends.cpu.get_cpu_capability()} if is_cpu else {"chip": hardware.device_name}
    return {**_versions(), **chip, **({"num_threads": torch.get_num_threads()} if is_cpu else {})}


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
