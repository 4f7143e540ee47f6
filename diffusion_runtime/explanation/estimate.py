"""Estimates of long work before it begins: operations, and the time that they take at least on this machine."""

from __future__ import annotations

import statistics
import time

import torch

# A product of this size takes a CPU 5 to 30 ms.
_SIZE = 512
_NUM_TIMED = 3


def estimate_text(operations: float, dtype: torch.dtype) -> str:
    """`5.5e+12 floating-point operations, 2 min or more on this CPU (...)`, at the rate of a matrix product, which no
    model reaches. dtype: of the operations. Takes a tenth of a second."""
    rate = _product_rate(dtype)
    gigaflops = f"{rate / 1e9:.3g} GF/s"
    return (
        f"{operations:.1e} floating-point operations, {duration_text(operations / rate)} or more on this CPU (at the "
        f"{gigaflops} of a matrix product)"
    )


def duration_text(seconds: float) -> str:
    """`8 s`, `3 min`, `2.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of two square matrices on the CPU."""
    a, b = (torch.randn(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    # The first product initialises the library.
    torch.mm(a, b)
    seconds = []
    for _ in range(_NUM_TIMED):
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    return float(2.0 * _SIZE**3 / statistics.median(seconds))
