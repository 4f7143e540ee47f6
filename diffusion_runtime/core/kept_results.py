"""KeptResults: results of earlier calls by their inputs, within a number of bytes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _OnHost:
    """A tensor that was copied to the machine's memory, and the device it came from."""

    tensor: torch.Tensor
    device: torch.device


class KeptResults:
    """Results of earlier calls: tensors, in tuples and dataclasses. They wait in the machine's memory; beyond max_bytes
    the least recently used ones are dropped. 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: Hashable, make: Callable[[], _T]) -> tuple[_T, bool]:
        """Return the result of an earlier call with this key and True, or what `make` returns and False. The tensors
        are on the device that `make` put them on. The caller does not write to them."""
        if (found := self._found.get(key)) is not None:
            self._found.move_to_end(key)
            return _mapped(found[1], _OnHost, lambda each: each.tensor.to(each.device)), True
        made = make()
        sizes: list[int] = []
        _mapped(made, torch.Tensor, lambda each: sizes.append(each.nbytes))
        if (size := sum(sizes)) <= self._max_bytes:
            kept = _mapped(made, torch.Tensor, lambda each: _OnHost(each.detach().to("cpu"), each.device))
            self._found[key] = size, kept
            self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._found.popitem(last=False)[1][0]
        return made, False

    def clear(self) -> None:
        """Forget all results."""
        self._found.clear()
        self._num_bytes = 0


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return the value with every part of a kind, in tuples and fields of dataclasses, replaced by what `change` makes
    of it."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(each, kind, change) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _mapped(each, kind, change) for name, each in fields.items()})
    return value
