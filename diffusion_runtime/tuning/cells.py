"""Cells of a tuning: layer ranges x step ranges of each self-attention role, and the schedule rules of a choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.config import AttentionSpec


@dataclass(frozen=True)
class Cell:
    """Consecutive layers of a role at consecutive steps."""

    role: str
    layers: range
    steps: range

    def __str__(self) -> str:
        return f"{self.role}, layers {_text(self.layers)}, steps {_text(self.steps)}"

    def to_dict(self) -> dict[str, Any]:
        return {"role": self.role, "layers": _text(self.layers), "steps": _text(self.steps)}


def make_cells(num_layers: Mapping[str, int], num_steps: int, layer_ranges: int, step_ranges: int) -> list[Cell]:
    """num_layers: by role. Ranges are as even as can be, and no more than there are layers or steps."""
    return [
        Cell(role, layers, steps)
        for role, count in num_layers.items()
        for layers in even_ranges(count, layer_ranges)
        for steps in even_ranges(num_steps, step_ranges)
    ]


def even_ranges(count: int, parts: int) -> list[range]:
    parts = min(parts, count)
    bounds = [index * count // parts for index in range(parts + 1)]
    return [range(first, stop) for first, stop in itertools.pairwise(bounds)]


def schedule_rules(chosen: Iterable[tuple[Cell, AttentionSpec | None]]) -> list[dict[str, Any]]:
    """Rules of an attention config for cells and their choices, None for those that stay dense. Ranges with one choice
    are one rule where they can be."""
    by_layers: dict[tuple[str, AttentionSpec, range], list[range]] = {}
    for cell, spec in chosen:
        if spec is not None:
            by_layers.setdefault((cell.role, spec, cell.layers), []).append(cell.steps)
    by_steps: dict[tuple[str, AttentionSpec, str], list[range]] = {}
    for (role, spec, layers), steps in by_layers.items():
        by_steps.setdefault((role, spec, _joined(steps)), []).append(layers)
    return [
        {"role": role, "layers": _joined(layers), "steps": steps, **spec.to_dict()}
        for (role, spec, steps), layers in by_steps.items()
    ]


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
