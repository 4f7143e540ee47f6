"""Known settings: whether a config holds nothing but values that code of ours computes as a library's class does.

Where it does not, the library's class is imported, and computes or refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Allows: TypeAlias = Callable[[Any], bool]


def are_known(settings: Mapping[str, Any], known: Mapping[str, Allows]) -> bool:
    """Return True if every key is among `known`, with a value that it allows."""
    return all(key in known and known[key](value) for key, value in settings.items())


def anything(_: Any) -> bool:
    return True


def is_nothing(value: Any) -> bool:
    return value is None


def is_false(value: Any) -> bool:
    return value is False


def is_true(value: Any) -> bool:
    return value is True


def is_number(value: Any) -> bool:
    """Finite."""
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def whole(least: int, most: int) -> Allows:
    return lambda value: type(value) is int and least <= value <= most


def either(*values: Any) -> Allows:
    """Allow one of these values, and of its type: 1 is not True."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def several(allows: Allows) -> Allows:
    """Allow a list of such values."""
    return lambda value: isinstance(value, list | tuple) and all(map(allows, value))
