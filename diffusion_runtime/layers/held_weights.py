"""Weights that are read outside of their block's call, while offloading keeps blocks in the machine's memory.

A block that is called has its weights on the device. To read them otherwise, such as for the keys of a text, enter
`held_weights(block)`: within it they are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import nn

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
