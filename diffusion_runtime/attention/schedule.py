"""Schedule: windows of steps, layers, phases and chunks: for rules of a config, for dense calls of sparse methods.

Ranges are inclusive, negative numbers count from the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from diffusion_runtime.core.step_info import PHASES, LayerInfo, StepInfo
from diffusion_runtime.errors import ConfigError, nearest, shown

# Of one value: every layer and step is looked up in them.
MAX_RANGES = 1000
_RANGE = re.compile(r"(-?[0-9]{1,9})(?:-(-?[0-9]{1,9}))?")
# What language-model servers call the phases of a model with a key-value cache.
_OTHER_SPELLINGS = {"decode": "denoise", "prefill": "commit"}


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
        if len(parts) > MAX_RANGES:
            raise ConfigError(f"{where}: expected at most {MAX_RANGES} ranges, got {len(parts)}")
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
        """Return whether it names no range, and so contains every index."""
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
    """The steps and layers in which a rule holds; of a model with a cache of keys and values the phase (one of PHASES,
    None for both), and of a video that is made chunk by chunk the chunks.

    Steps are those of denoising: one that names some does not hold in commits, which come after the last.
    """

    steps: IndexRanges = IndexRanges()
    layers: IndexRanges = IndexRanges()
    phase: str | None = None
    chunks: IndexRanges = IndexRanges()

    def holds_in_phase_of(self, layer: LayerInfo) -> bool:
        """Return whether it can hold in the phase in which the layer runs."""
        if layer.phase == "commit" and not self.steps.is_every:
            return False
        return self.phase is None or layer.phase in (None, self.phase)

    def holds_in_layer(self, layer: LayerInfo) -> bool:
        return self.layers.contains(layer.index, layer.num_layers) and self.holds_in_phase_of(layer)

    def holds(self, layer: LayerInfo, step: StepInfo) -> bool:
        return self.holds_in_layer(layer) and self.holds_at(step)

    def holds_at(self, step: StepInfo) -> bool:
        """Return whether it holds at this step, in the layers that it names."""
        if self.phase not in (None, step.phase) or not self.chunks.contains(step.chunk, 0):
            return False
        return self.steps.is_every or (step.phase != "commit" and self.steps.contains(step.index, step.num_steps))

    def __str__(self) -> str:
        phase = "" if self.phase is None else f", phase {self.phase}"
        chunks = "" if self.chunks.is_every else f", chunks {self.chunks}"
        return f"steps {self.steps}, layers {self.layers}{phase}{chunks}"


def parse_phase(value: Any, where: str) -> str | None:
    """One of PHASES, by any of its spellings, or None for both. Raises ConfigError that names `where`."""
    if value is None:
        return None
    phase = _OTHER_SPELLINGS.get(value, value) if isinstance(value, str) else value
    if phase not in PHASES:
        known = (*PHASES, *_OTHER_SPELLINGS)
        raise ConfigError(f"{where}: expected {', '.join(known)}, got {shown(value)}.{nearest(str(value), known)}")
    return str(phase)


def parse_chunks(value: Any, where: str) -> IndexRanges:
    """Ranges of chunks such as `0-3`. Raises ConfigError, also for one that counts from the end: a stream has none."""
    chunks = IndexRanges.parse(value, where)
    if any(bound < 0 for pair in chunks.ranges for bound in pair):
        raise ConfigError(f"{where}: expected chunks counted from the first, 0, as in 0-3, got {shown(value)}")
    return chunks


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
