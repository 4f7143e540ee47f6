"""Weights that wait elsewhere: parameters of the right shape and dtype, without memory, which hold NaN, so that
computing with one that was not brought gives NaN.

A block that is called has its weights on the device. To read them otherwise, such as for the keys of a text, enter
`held_weights(block)`: within it they are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import nn


def nothing_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of that shape on the CPU in the memory of one number: NaN, 255 for bytes, which are NaN as scales
    of GGUF blocks, zero for other integers. dtype: of floating-point numbers, None for the tensor's own."""
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    value = float("nan") if tensor.is_floating_point() else 255.0 if dtype == torch.uint8 else 0.0
    one = torch.full((1,), value).to(dtype)
    return one.expand(tensor.shape) if tensor.dim() else one.view(())


def let_wait(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Give what is in the state dict of a module such tensors; what is shared stays shared. dtype: as of
    nothing_like."""
    state = module.state_dict(keep_vars=True)
    waiting: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in waiting:
            empty = nothing_like(tensor.detach(), dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            waiting[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    module.load_state_dict({name: waiting[id(tensor)] for name, tensor in state.items()}, assign=True)
    module.requires_grad_(False).eval()


def is_waiting(module: nn.Module) -> bool:
    """Return True if a module's parameters still wait for their values: one number represents each whole matrix."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1 and parameter.numel() > 1]
    return bool(matrices) and all(not any(matrix.stride()) for matrix in matrices)


Hold: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
_HOLD = "_hold_weights"


@contextlib.contextmanager
def held_weights(module: nn.Module) -> Iterator[None]:
    """Within the block, the weights of `module` are on the device that it computes on."""
    hold: Hold | None = getattr(module, _HOLD, None)
    if hold is None:
        yield
    else:
        with hold():
            yield


def set_hold(module: nn.Module, hold: Hold | None) -> None:
    """Set what `held_weights` enters for a module; None for one whose weights are always present."""
    # Not a parameter, buffer or module: nothing of a state dict.
    setattr(module, _HOLD, hold)
