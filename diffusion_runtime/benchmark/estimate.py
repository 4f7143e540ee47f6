"""Estimates of long work before it begins: operations, and the time that they take at least on this machine."""

from __future__ import annotations

import torch

from diffusion_runtime.benchmark.clock import Clock, matmul_tflops

# A product of this size takes a CPU 5 to 30 ms.
_SIZE = 512


def estimate_text(operations: float, dtype: torch.dtype) -> str:
    """`5.5e+12 floating-point operations, 2 min or more on this CPU (...)`, at the rate of a matrix product, which no
    model reaches. dtype: of the operations. Takes a tenth of a second."""
    rate = 1e12 * matmul_tflops(Clock(torch.device("cpu")), dtype, _SIZE, repeats=3)
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
