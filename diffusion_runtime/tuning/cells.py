"""Cells of a tuning: layer ranges x step ranges of each self-attention role, and head ranges where a method has windows
by head; the schedule rules of a choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.config import AttentionSpec


@dataclass(frozen=True)
class Cell:
    """Consecutive layers of a role at consecutive steps. heads: of the num_heads query heads of these layers; None
    where all of them are together."""

    role: str
    layers: range
    steps: range
    heads: range | None = None
    num_heads: int = 0

    @property
    def weight(self) -> float:
        """Layers times steps, of the share of heads."""
        share = 1.0 if self.heads is None else len(self.heads) / self.num_heads
        return len(self.layers) * len(self.steps) * share

    def __str__(self) -> str:
        heads = "" if self.heads is None else f", heads {_text(self.heads)}"
        return f"{self.role}, layers {_text(self.layers)}, steps {_text(self.steps)}{heads}"

    def to_dict(self) -> dict[str, Any]:
        heads = {} if self.heads is None else {"heads": _text(self.heads)}
        return {"role": self.role, "layers": _text(self.layers), "steps": _text(self.steps), **heads}


def make_cells(
    num_layers: Mapping[str, int],
    num_steps: int,
    layer_ranges: int,
    step_ranges: int,
    num_heads: int = 0,
    head_ranges: int = 1,
) -> list[Cell]:
    """num_layers: by role. head_ranges: 1 keeps the num_heads query heads of a layer together. Ranges are as even as
    can be, and no more than there are layers, steps or heads."""
    heads: list[range | None] = [*even_ranges(num_heads, head_ranges)] if head_ranges > 1 else [None]
    return [
        Cell(role, layers, steps, of_heads, 0 if of_heads is None else num_heads)
        for role, count in num_layers.items()
        for layers in even_ranges(count, layer_ranges)
        for steps in even_ranges(num_steps, step_ranges)
        for of_heads in heads
    ]


def even_ranges(count: int, parts: int) -> list[range]:
    parts = min(parts, count)
    bounds = [index * count // parts for index in range(parts + 1)]
    return [range(first, stop) for first, stop in itertools.pairwise(bounds)]


def schedule_rules(chosen: Iterable[tuple[Cell, AttentionSpec | None]]) -> list[dict[str, Any]]:
    """Rules of an attention config for cells and their choices, None for those that stay dense. Ranges with one choice
    are one rule where they can be; cells of one place and other heads are one rule with `head_windows`."""
    by_layers: dict[tuple[str, AttentionSpec, range], list[range]] = {}
    for cell, spec in _of_all_heads(chosen):
        if spec is not None:
            by_layers.setdefault((cell.role, spec, cell.layers), []).append(cell.steps)
    by_steps: dict[tuple[str, AttentionSpec, str], list[range]] = {}
    for (role, spec, layers), steps in by_layers.items():
        by_steps.setdefault((role, spec, _joined(steps)), []).append(layers)
    return [
        {"role": role, "layers": _joined(layers), "steps": steps, **spec.to_dict()}
        for (role, spec, steps), layers in by_steps.items()
    ]


def _of_all_heads(chosen: Iterable[tuple[Cell, AttentionSpec | None]]) -> Iterator[tuple[Cell, AttentionSpec | None]]:
    """Cells of some heads as one of all heads. Their choices differ in `window` alone, and heads without one are
    dense."""
    of_heads: dict[Cell, list[AttentionSpec | None]] = {}
    for cell, spec in chosen:
        if cell.heads is None:
            yield cell, spec
            continue
        specs = of_heads.setdefault(Cell(cell.role, cell.layers, cell.steps), [None] * cell.num_heads)
        for head in cell.heads:
            specs[head] = spec
    for cell, specs in of_heads.items():
        sparse = [spec for spec in specs if spec is not None]
        if not sparse or all(spec == specs[0] for spec in specs):
            yield cell, specs[0]
            continue
        shared = {name: value for name, value in sparse[0].options.items() if name != "window"}
        windows = tuple(None if spec is None else spec.options["window"] for spec in specs)
        yield cell, AttentionSpec(sparse[0].name, {**shared, "head_windows": windows})


def _joined(ranges: Sequence[range]) -> str:
    """Ranges in order, those that touch as one: `0-3,6-7`."""
    merged: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if merged and merged[-1].stop == each.start:
            merged[-1] = range(merged[-1].start, each.stop)
        else:
            merged.append(each)
    return ",".join(map(_text, merged))


def _text(indexes: range) -> str:
    return str(indexes.start) if len(indexes) == 1 else f"{indexes.start}-{indexes.stop - 1}"
