"""First use of kernels: how many libraries compiled in this process so far, and in how many seconds.

Triton tells it of each kernel that it compiles (its `knobs.compilation.listener`), and of none that it finds in its
cache on disk. FlashAttention-4 (CuTe) compiles within the first call of a form, which the caller times.

A layer of at most NARROW numbers per token compiles nothing unless it is asked to. The embedded models' are 256 and 384
wide: the whole generation of the former takes 0.06 s on one H200, and a first command took 7 s for FlashAttention-4's
kernel and 2 to 3 s for Triton's, every later one 3 s to import the former (benchmarks/results/start_gpu.json). The
decision is by the layer's width and not by what a machine has compiled before, so that a command gives the same frames
at its first run and later.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

# Published models are 1,536 wide and more.
NARROW = 384


@dataclass
class _Compiled:
    num_kernels: int = 0
    seconds: float = 0.0


_compiled = _Compiled()
# Several threads compile while weights are read.
_counting = threading.Lock()


def kernels_compiled() -> tuple[int, float]:
    """(kernels, seconds) of this process so far."""
    return _compiled.num_kernels, _compiled.seconds


def count_kernel(seconds: float) -> None:
    """Count a kernel that was compiled, or read from disk, in so many seconds of a first call."""
    with _counting:
        _compiled.num_kernels += 1
        _compiled.seconds += seconds


def watch_triton() -> None:
    """Have Triton report what it compiles from now on, once it is imported. An earlier listener keeps listening."""
    triton = sys.modules.get("triton")
    compilation = getattr(getattr(triton, "knobs", None), "compilation", None)
    if compilation is None or isinstance(compilation.listener, _Listener):
        return
    compilation.listener = _Listener(compilation.listener)


class _Listener:
    """Triton's CompilationListener, for its own argument names. others: the earlier listener, or None."""

    def __init__(self, others: Any) -> None:
        self._others = others

    def __call__(self, **event: Any) -> None:
        if not event.get("cache_hit", False):
            # Microseconds.
            count_kernel(getattr(event.get("times"), "total", 0) / 1e6)
        if self._others is not None:
            self._others(**event)
