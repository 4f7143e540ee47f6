"""Schedule: windows of steps and layers, for rules of a config and for the dense calls of sparse methods.

Ranges are inclusive, negative numbers count from the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.step_info import LayerInfo, StepInfo

_RANGE = re.compile(r"(-?[0-9]{1,9})(?:-(-?[0-9]{1,9}))?")


@dataclass(frozen=True)
class IndexRanges:
    """Which indexes of a row of `count` things; no ranges at all means every one.

    ranges: inclusive (first, last) pairs; negative numbers count from the end, as in Python.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, value: Any, where: str) -> Self:
        """`0-3`, `0-1,10,-2--1`, a number, a list of these, or None for all. Raises ConfigError that names `where`."""
        if value is None or isinstance(value, IndexRanges):
            return cls(() if value is None else value.ranges)
        parts = value if isinstance(value, list | tuple) else value.split(",") if isinstance(value, str) else [value]
        ranges = []
        for part in parts:
            match = _RANGE.fullmatch(part.strip() if isinstance(part, str) else shown(part))
            if isinstance(part, bool) or match is None:
                raise ConfigError(f"{where}: expected ranges such as 0-3,10,-2--1, got {shown(value)}")
            first = int(match[1])
            last = first if match[2] is None else int(match[2])
            if (first < 0) == (last < 0) and last < first:
                raise ConfigError(f"{where}: the range {str(part)[:80]} ends before it starts")
            ranges.append((first, last))
        return cls(tuple(ranges))

    @classmethod
    def first(cls, count: int) -> Self:
        """The first `count` indexes, 1 or more."""
        return cls(((0, count - 1),))

    @property
    def is_every(self) -> bool:
        """Whether it names no range, and so contains every index."""
        return not self.ranges

    def contains(self, index: int, count: int) -> bool:
        if not self.ranges:
            return True
        for first, last in self.ranges:
            low = first + count if first < 0 else first
            high = last + count if last < 0 else last
            if low <= index <= high:
                return True
        return False

    def __str__(self) -> str:
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ranges) or "all"


@dataclass(frozen=True)
class Window:
    """The steps and layers in which a rule holds."""

    steps: IndexRanges = IndexRanges()
    layers: IndexRanges = IndexRanges()

    def holds_in_layer(self, layer: LayerInfo) -> bool:
        return self.layers.contains(layer.index, layer.num_layers)

    def holds(self, layer: LayerInfo, step: StepInfo) -> bool:
        return self.holds_in_layer(layer) and self.steps.contains(step.index, step.num_steps)

    def __str__(self) -> str:
        return f"steps {self.steps}, layers {self.layers}"


@dataclass(frozen=True)
class DenseRule:
    """Calls of a sparse method that attend to every key: those within window, of grids with fewer than min_tokens
    tokens where that is above 0. option: the option that makes the rule, with its value, for the report."""

    option: str
    window: Window = Window()
    min_tokens: int = 0

    def holds(self, layer: LayerInfo, step: StepInfo, num_tokens: int) -> bool:
        """num_tokens: of the grid."""
        return (not self.min_tokens or num_tokens < self.min_tokens) and self.window.holds(layer, step)

    def __str__(self) -> str:
        if self.min_tokens:
            return f"below {self.option}"
        named = {"steps": self.window.steps, "layers": self.window.layers}
        where = ", ".join(f"{what} {ranges}" for what, ranges in named.items() if not ranges.is_every)
        return f"{where or 'every call'} ({self.option})"


def dense_first_steps(count: int, option: str) -> tuple[DenseRule, ...]:
    """The rule of an option that keeps the first `count` steps dense; none for 0."""
    return (DenseRule(option, Window(steps=IndexRanges.first(count))),) if count > 0 else ()


def dense_first_layers(count: int, option: str) -> tuple[DenseRule, ...]:
    """The rule of an option that keeps the first `count` layers dense; none for 0."""
    return (DenseRule(option, Window(layers=IndexRanges.first(count))),) if count > 0 else ()
