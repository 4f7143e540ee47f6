"""Milliseconds a call on a device, of several functions side by side, so that drift of the machine hits all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

# A sample lasts at least this long, which hides the gaps between launches and the grain of the clock.
_SAMPLE_MILLISECONDS = 5.0
_MOST_CALLS = 100


def milliseconds(function: Callable[[], object], num_calls: int, device: torch.device) -> float:
    """The time of one call, of `num_calls` in a row: the device's own clock on CUDA and ROCm, the host's elsewhere."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(num_calls):
                function()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / num_calls
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(num_calls):
        function()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - started) / num_calls


def time_alternately(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    num_rounds: int,
    deadline: float = math.inf,
) -> dict[str, list[float]]:
    """Samples in milliseconds a call, one a function and round, every round in another order.

    The functions must have run before: what they compile or allocate at first is not to be timed. deadline: of
    time.monotonic(); past it no round begins, but there is always one sample of each.
    """
    samples: dict[str, list[float]] = {}
    num_calls: dict[str, int] = {}
    for name, function in functions.items():
        first = milliseconds(function, 1, device)
        num_calls[name] = min(_MOST_CALLS, math.ceil(_SAMPLE_MILLISECONDS / max(first, 1e-6)))
        # A call that is a sample by itself need not be made again.
        samples[name] = [first] if num_calls[name] == 1 else [milliseconds(function, num_calls[name], device)]
    names = list(functions)
    for turn in range(1, num_rounds):
        if time.monotonic() >= deadline:
            break
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            samples[name].append(milliseconds(functions[name], num_calls[name], device))
    return samples


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
