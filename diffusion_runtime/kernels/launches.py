"""Triton launches of a few microseconds: compiled kernels cached by what their arguments depend on.

Triton's own dispatch binds, specialises and hashes every argument of every call: 50 us for the forty of a modulated
norm, and a transformer of 34 blocks calls 170 such kernels per forward. Calls that repeat skip it.

A forward pass on the meta device, by which memory is planned, names the launches that a GPU will make
(`expecting_launches`), so that they are compiled while weights are read (kernels/compile_ahead.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVarTuple

import torch

from diffusion_runtime.core.device_guard import device_guard, guard_is_needed
from diffusion_runtime.kernels.implementation import fusion_is_on, is_narrow, may_run_on
from diffusion_runtime.startup.importing import import_failure

_Arguments = TypeVarTuple("_Arguments")
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


class ExpectedLaunch(NamedTuple):
    """A launch that a plan has met. dtypes: of its pointers, which are taken for multiples of 16 bytes."""

    launch: Launch
    dtypes: tuple[torch.dtype, ...]


_expected: ContextVar[dict[Hashable, ExpectedLaunch] | None] = ContextVar("expected_launches", default=None)


@contextlib.contextmanager
def expecting_launches(*, is_on: bool = True) -> Iterator[dict[Hashable, ExpectedLaunch]]:
    """Context manager: give a dictionary to which calls on the meta device add the launches of a GPU, where is_on."""
    found: dict[Hashable, ExpectedLaunch] = {}
    token = _expected.set(found if is_on else None)
    try:
        yield found
    finally:
        _expected.reset(token)


def is_expecting(x: torch.Tensor, width: int) -> bool:
    """Return True if a call like x is to add its launch to those that are expected. width: of the layer's tokens.
    Imports Triton then."""
    return _expected.get() is not None and x.is_meta and not is_narrow(width) and import_failure("triton") is None


class CompiledLaunch(NamedTuple):
    """launch: of a compiled kernel on its grid. others: its arguments behind the pointers."""

    launch: Callable[..., object]
    others: tuple[Any, ...]

    def run(self, pointers: tuple[torch.Tensor, ...]) -> None:
        # As addresses: of a tensor, Triton asks the driver whether its address is one of a GPU, ten times per norm.
        self.launch(*map(torch.Tensor.data_ptr, pointers), *self.others)


class LaunchCache:
    """The launches of one kernel. Threads may share it: one may start over while another launches what it found."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, CompiledLaunch] = {}

    def repeat(
        self, device: torch.device, key: Callable[[*_Arguments], Hashable], *arguments: *_Arguments
    ) -> CompiledLaunch | None:
        """Return the launch of a call like an earlier one, which may skip its checks; None for the first of its kind,
        and if something outside the keys has changed. key: of the arguments, with all that checks and launch depend on.
        """
        return self._launches.get(key(*arguments)) if may_repeat(device) else None

    def run(self, key: Hashable, pointers: tuple[torch.Tensor, ...], prepare: Callable[[], Launch]) -> None:
        """Launch on `pointers`, the first arguments. key: `kind_of` every pointer, and all else that the result of
        `prepare` depends on."""
        device = pointers[0].device
        if device.type == "meta":
            expected = _expected.get()
            if expected is not None and (id(self), key) not in expected:
                expected[id(self), key] = ExpectedLaunch(prepare(), tuple(each.dtype for each in pointers))
            return
        if guard_is_needed(device):
            with device_guard(device):
                self.run(key, pointers, prepare)
            return
        found = self._launches.get(key)
        if found is not None:
            found.run(pointers)
            return
        kernel, grid, numbers, constants, num_warps = prepare()
        compiled = kernel[grid](*pointers, *numbers, **constants, num_warps=num_warps)
        if compiled is None:
            # Triton's interpreter compiles nothing.
            return
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = CompiledLaunch(compiled[grid], (*numbers, *constants.values()))


def kind_of(tensor: torch.Tensor | None) -> Hashable:
    """Return the properties of a tensor on which a call's checks, a compiled kernel and its numbers depend: Triton
    specialises on the dtype and on pointers that are multiples of 16 bytes."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() & 15, tensor.get_device()


def may_repeat(device: torch.device) -> bool:
    """Return True if a call with a known key may skip its checks: all that is outside the key is as required."""
    return (
        may_run_on(device)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_dynamo_compiling()
        and not guard_is_needed(device)
        and fusion_is_on()
    )
