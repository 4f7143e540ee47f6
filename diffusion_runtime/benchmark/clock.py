"""Clock: times of calls, by CUDA events on a GPU and by the processor's clock elsewhere."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

# Cycles of the device before a timed call, so that the host is ahead when the first event is reached.
_LEAD_CYCLES = 200_000


class Clock:
    """Times of calls, by the device's clock; of a CPU by its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Return the milliseconds of one call."""
        self.synchronize()
        if self.device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(_LEAD_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(stop))
        begin = time.perf_counter()
        run()
        self.synchronize()
        return (time.perf_counter() - begin) * 1000

    def median_ms(self, run: Callable[[int], object], repeats: int, num_warm: int = 2) -> float:
        """Return the median milliseconds of calls after `num_warm` others. run: takes the number of the repeat."""
        times = [self.milliseconds(functools.partial(run, repeat)) for repeat in range(repeats + num_warm)]
        return statistics.median(times[num_warm:])

    def host_ms(self, run: Callable[[], object]) -> float:
        """Until one call returns, on an idle device."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        spent = time.perf_counter() - begin
        self.synchronize()
        return spent * 1000


def matmul_tflops(clock: Clock, dtype: torch.dtype, size: int, repeats: int = 9) -> float:
    """Measure the matmul limit: 10 ** 12 operations per second of a product of two matrices of size x size."""
    a, b = (torch.randn(size, size, device=clock.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / clock.median_ms(lambda _: torch.mm(a, b, out=out), repeats) / 1e9
