"""Triton launches of a few microseconds: compiled kernels cached by what their arguments depend on.

Triton's own dispatch binds, specialises and hashes every argument of every call: 50 us for the forty of a modulated
norm, and a transformer of 34 blocks calls 170 such kernels per forward. Calls that repeat skip it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

# Kinds of calls per kernel that are cached; a server that makes clips of every size starts over here.
MAX_LAUNCHES = 4096


class Launch(NamedTuple):
    """kernel: a Triton function. numbers: the arguments behind its pointers; constants: its compile-time arguments, in
    the order of the signature."""

    kernel: Any
    grid: tuple[int, int, int]
    numbers: tuple[int | float, ...]
    constants: Mapping[str, Any]
    num_warps: int


class LaunchCache:
    """The launches of one kernel."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, tuple[Callable[..., object], tuple[Any, ...]]] = {}

    def run(self, key: Hashable, pointers: tuple[torch.Tensor, ...], prepare: Callable[[], Launch]) -> None:
        """Launch on `pointers`, the first arguments. key: the device, `kind_of` every pointer, and all else that the
        result of `prepare` depends on."""
        found = self._launches.get(key)
        if found is not None:
            launch, others = found
            launch(*pointers, *others)
            return
        kernel, grid, numbers, constants, num_warps = prepare()
        compiled = kernel[grid](*pointers, *numbers, **constants, num_warps=num_warps)
        if compiled is None:
            # Triton's interpreter compiles nothing.
            return
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = compiled[grid], (*numbers, *constants.values())


def kind_of(tensor: torch.Tensor | None) -> Hashable:
    """What a compiled kernel and its numbers depend on, the shape apart: Triton specialises on the dtype and on
    pointers that are multiples of 16 bytes."""
    return None if tensor is None else (tensor.dtype, tensor.stride(), tensor.data_ptr() % 16)
