"""A mapping that cannot be changed and, unlike types.MappingProxyType, can be copied and pickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

Value = TypeVar("Value")


class FrozenMapping(Mapping[str, Value], Generic[Value]):
    """The items of `values` at construction, in their order; equal to any mapping with the same items."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[FrozenMapping[Value]], tuple[dict[str, Value]]]:
        return type(self), (dict(self._values),)

    def __repr__(self) -> str:
        return repr(self._values)
