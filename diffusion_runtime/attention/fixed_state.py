"""Fixed state: the values of a request where a captured CUDA graph reads them, and later requests write theirs.

A graph reads and writes addresses. What a forward pass is given, and what it finds in its RequestCache, is cloned
before the capture; values of a later request are copied into the clones.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch

from diffusion_runtime.attention.context import CacheScope, RequestCache

T = TypeVar("T")

# Metadata of a dataclass's field whose values are neither compared nor copied.
NOT_COPIED: Mapping[str, bool] = MappingProxyType({"is_copied": False})
_MISSING = object()


def form_of(value: Any) -> Hashable:
    """All of a value but the numbers in its tensors: values of one form differ in those alone. Objects that are no
    tensors, dataclasses, tuples, lists or dicts are their own form."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.stride(), value.dtype, value.device
    parts = _parts(value)
    if parts is None:
        return value if isinstance(value, Hashable) else id(value)
    return type(value), tuple((name, form_of(part)) for name, part in parts)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, in the same order in all values of one form."""
    if isinstance(value, torch.Tensor):
        yield value
    for _, part in _parts(value) or ():
        yield from tensors_of(part)


class Clones:
    """Clones of values, with tensors of their own in the same sizes and strides. An object that occurs twice is
    one object in the clones."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, object]] = {}

    def of(self, value: T) -> T:
        """A clone of what `form_of` looks into; other objects are taken as they are."""
        if id(value) not in self._known:
            # With the value itself, so that no other object gets its id meanwhile.
            self._known[id(value)] = (value, self._clone(value))
        return cast(T, self._known[id(value)][1])

    def _clone(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
        if _is_record(value):
            clone = copy.copy(value)
            for item in dataclasses.fields(value):
                object.__setattr__(clone, item.name, self.of(getattr(value, item.name)))
            return clone
        if isinstance(value, dict):
            return {key: self.of(part) for key, part in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.of(part) for part in value)
        return value


class FixedState(RequestCache):
    """A RequestCache whose values are clones of another's, made as they are asked for.

    changes: what was created or replaced; a forward pass that does so cannot be replayed, as the next one would find
    what this one left.
    """

    def __init__(self, source: RequestCache, clones: Clones) -> None:
        self._source: RequestCache | None = source
        self._clones: Clones | None = clones
        self._used: dict[tuple[Hashable, Hashable], object] = {}
        self._changes: dict[str, None] = {}
        super().__init__()

    @property
    def changes(self) -> tuple[str, ...]:
        return tuple(self._changes)

    def close(self) -> None:
        """Nothing is cloned from here on."""
        self._source = self._clones = None

    def difference(self, other: RequestCache) -> str | None:
        """Return why the values of another request cannot be copied; None where they can."""
        for (scope, key), fixed in self._used.items():
            found = other.scope(scope).find(key, _MISSING)
            if found is _MISSING:
                return f"{_name(key)} is not there"
            if form_of(found) != form_of(fixed):
                return f"{_name(key)} has another form"
        return None

    def copy_from(self, other: RequestCache) -> None:
        """Take the values of another request, whose `difference` is None."""
        for (scope, key), fixed in self._used.items():
            copy_tensors(other.scope(scope).find(key), fixed)

    def is_first(self, what: str) -> bool:
        return self._source is not None and self._source.is_first(what)

    def _make_scope(self, key: Hashable) -> CacheScope:
        return _FixedScope(self, key)

    def take(self, scope: Hashable, key: Hashable) -> object:
        """The clone of a value, and `missing` where there is none."""
        if self._source is None or self._clones is None:
            return _MISSING
        value = self._source.scope(scope).find(key, _MISSING)
        if value is _MISSING:
            return _MISSING
        clone = self._used[scope, key] = self._clones.of(value)
        return clone

    def note_change(self, key: Hashable) -> None:
        """A value was created or replaced."""
        self._changes[f"it keeps {_name(key)} from step to step"] = None


class _FixedScope(CacheScope):
    def __init__(self, owner: FixedState, key: Hashable) -> None:
        super().__init__()
        self._owner = owner
        self._key = key

    def get_or_create(self, key: Hashable, create: Callable[[], T]) -> T:
        if self.find(key, _MISSING) is _MISSING:
            self._owner.note_change(key)
            super().put(key, create())
        return super().get_or_create(key, create)

    def put(self, key: Hashable, value: object) -> None:
        self._owner.note_change(key)
        super().put(key, value)

    def find(self, key: Hashable, default: object = None) -> object:
        found = super().find(key, _MISSING)
        if found is _MISSING:
            found = self._owner.take(self._key, key)
            if found is not _MISSING:
                super().put(key, found)
        return default if found is _MISSING else found


def copy_tensors(source: Any, target: Any) -> None:
    """Copy the numbers of all tensors into those of a value of the same form."""
    for fixed, new in zip(tensors_of(target), tensors_of(source), strict=True):
        if fixed is not new:
            fixed.copy_(new)


def _parts(value: Any) -> list[tuple[Hashable, Any]] | None:
    if _is_record(value):
        copied = (item for item in dataclasses.fields(value) if item.metadata.get("is_copied", True))
        return [(item.name, getattr(value, item.name)) for item in copied]
    if isinstance(value, dict):
        return list(value.items())
    if type(value) in (tuple, list):
        return list(enumerate(value))
    return None


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _name(key: Hashable) -> str:
    """Return the name of a cache's key, which begins with a name or is a function with its arguments."""
    first = key[0] if isinstance(key, tuple) and key else key
    words = key[:2] if isinstance(key, tuple) and isinstance(first, str) else (first,)
    return " ".join(getattr(word, "__name__", str(word))[:60] for word in words)
