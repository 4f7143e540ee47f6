"""Device and autocast guard: autocast off, current CUDA device set, new tensors on the CPU.

Without it `torch.autocast` lowers the float32 products that planners and references rely on, Triton launches on the
current CUDA device whichever device its tensors are on, and `torch.set_default_device` moves tensors that belong on the
CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


def guard_is_needed(device: torch.device) -> bool:
    """Return True if a call on tensors of `device` needs the guard; takes below 1 us, so every call may check."""
    kind = device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return True
    return kind == "cuda" and device.index is not None and device.index != torch.cuda.current_device()


@contextmanager
def device_guard(device: torch.device) -> Iterator[None]:
    """Autocast off for `device`, new tensors on the CPU unless a device is given, `device` the current CUDA device."""
    with ExitStack() as stack:
        if _is_autocast(device):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda" and device.index is not None:
            stack.enter_context(torch.cuda.device(device))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def must_not_wait(x: torch.Tensor) -> bool:
    """Return True while a CUDA graph is captured, when nothing may wait for the device, and for a tensor without
    numbers."""
    return x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing())


# By type of device.
_autocast: dict[str, bool] = {}


def _is_autocast(device: torch.device) -> bool:
    kind = device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


def _has_autocast(kind: str) -> bool:
    """Return False for device types without autocast, such as meta, which raise when asked if it is enabled."""
    # No functools.cache: torch.compile warns of what it wraps.
    if kind not in _autocast:
        _autocast[kind] = torch.amp.is_autocast_available(kind)
    return _autocast[kind]
