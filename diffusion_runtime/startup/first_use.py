"""First use of kernels: how many libraries compiled in this process so far, and in how many seconds.

Triton tells it of each kernel that it compiles (its `knobs.compilation.listener`), and of none that it finds in its
cache on disk. FlashAttention-4 (CuTe) compiles within the first call of a form, which the caller times.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass
class _Compiled:
    num_kernels: int = 0
    seconds: float = 0.0


_compiled = _Compiled()


def kernels_compiled() -> tuple[int, float]:
    """(kernels, seconds) of this process so far."""
    return _compiled.num_kernels, _compiled.seconds


def count_kernel(seconds: float) -> None:
    """Count a kernel that was compiled, or read from disk, in so many seconds of a first call."""
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
