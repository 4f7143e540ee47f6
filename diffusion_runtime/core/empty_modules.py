"""Modules without weights: made on the meta device, without the initial values that loading would overwrite.

On the meta device an initial value is still computed by torch's decompositions in Python, for nothing: `nn.Linear`
takes 124 us there and 65 us without (CPU time), and a model has thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# In-place fills that leave a tensor's shape and dtype as they are. The rest of torch.nn.init calls these.
_FILLS: frozenset[Callable[..., Any]] = frozenset(
    (
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.constant_,
        nn.init.kaiming_uniform_,
        torch.Tensor.uniform_,
        torch.Tensor.normal_,
        torch.Tensor.fill_,
        torch.Tensor.zero_,
    )
)


@contextmanager
def empty_modules() -> Iterator[None]:
    """New tensors, and with them modules, are on the meta device and get no initial values, in this thread."""
    with torch.device("meta"), _NoInitialValues():
        yield


class _NoInitialValues(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS:
            tensor = args[0] if args else kwargs["tensor"]
            # Fills of nothing are left to torch, which warns of them.
            if tensor.is_meta and tensor.numel():
                return tensor
        return func(*args, **kwargs)
