"""Checks of scheduler settings: values that a solver of ours computes as diffusers' class does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def is_nothing(value: Any) -> bool:
    return value is None


def unused(value: Any) -> bool:
    return value is False


def is_true(value: Any) -> bool:
    return value is True


def is_number(value: Any) -> bool:
    """Above 0 and finite."""
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def is_whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def either(*values: Any) -> Callable[[Any], bool]:
    """One of them, and of its type: 1 is not True."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)
