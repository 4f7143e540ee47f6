"""Handles: integers, in tensors, that identify objects which torch.compile must not trace.

A compiled graph passes tensors to its operators. An integer would be compiled in as a constant, and a graph made for
one layer or one request would not serve the next; the value of a tensor is no part of a graph.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class HandleTable(Generic[T]):
    """Objects by handle. The table keeps none alive: an entry is gone with its object, so nothing is to be released.
    Every thread may use it."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()
        # `next` of a count is one step of the interpreter: no two threads get the same number.
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._objects)

    def number_of(self, value: T) -> int:
        """A new number of `value`, 1 or more."""
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def handle_of(self, value: T) -> torch.Tensor:
        """A new handle of `value`: int64, without dimensions, on the CPU, where reading it waits for no device."""
        return torch.tensor(self.number_of(value), dtype=torch.int64, device="cpu")

    def find(self, handle: torch.Tensor) -> T:
        """The object of a handle. Raises RuntimeError when it is gone: the caller of a graph holds its objects."""
        return self.find_number(int(handle))

    def find_number(self, number: int) -> T:
        """The object of a number. Raises RuntimeError when it is gone."""
        try:
            return self._objects[number]
        except KeyError:
            raise RuntimeError(f"handle {number}: its object no longer exists") from None
