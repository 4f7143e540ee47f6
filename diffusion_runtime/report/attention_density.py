"""Density of attention by layer and step, and one plan as a picture: counted while a generation runs, where asked for.

Density is the share of the pairs of valid queries and keys that is computed, text included. Counting reads every plan
back from the device and waits for it, so it is done on request only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from diffusion_runtime.core.step_info import LayerInfo, StepInfo

if TYPE_CHECKING:
    import torch

# A picture of a plan has at most this many cells per side: the blocks of a long video are averaged.
MAX_CELLS = 192


class CountedPlan(Protocol):
    """Attributes of a block-sparse plan (SparsePlan of kernels/block_sparse) that are read here."""

    @property
    def method(self) -> str: ...

    @property
    def density(self) -> float: ...

    def kept_blocks(self, sample: int, head: int) -> torch.Tensor:
        """float32 [query blocks, key blocks]: the share of a block's queries that see each key block."""
        ...


class Kept(NamedTuple):
    """Pairs that a call, or a part of its heads, kept. plan: None for every pair."""

    plan: CountedPlan | None = None

    def density(self) -> float:
        """Waits for the device."""
        return 1.0 if self.plan is None else self.plan.density


@dataclass(frozen=True)
class LayerDensity:
    """The density of one layer's calls by step, the mean over guidance branches; None at steps without a call, such as
    reused ones."""

    role: str
    layer: int
    steps: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"role": self.role, "layer": self.layer, "steps": [_rounded(each) for each in self.steps]}


@dataclass(frozen=True)
class PlanPicture:
    """Which key blocks the query blocks of one head keep, of one call.

    cells: one text per row of query blocks, one digit per key block: 0 for none of the block's pairs, 9 for all. Where
    there are more than MAX_CELLS blocks a cell is the mean of several. Blocks stand in the method's own order.
    """

    role: str
    layer: int
    step: int
    head: int
    method: str
    density: float
    num_query_blocks: int
    num_key_blocks: int
    cells: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "density": _rounded(self.density), "cells": list(self.cells)}


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)


class DensityCounter:
    """Counts the calls of one request. The picture is of the sparse call nearest to the middle of layers and steps."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], dict[int, tuple[float, int]]] = {}
        self._num_steps = 0
        self._nearest: float | None = None
        self._picture: PlanPicture | None = None

    def add(self, layer: LayerInfo, step: StepInfo, parts: Sequence[Kept]) -> None:
        """Add one call, computed in parts of equally many heads; none of them for a process without tokens."""
        if not parts:
            return
        share = sum(part.density() for part in parts) / len(parts)
        self._num_steps = max(self._num_steps, step.num_steps, step.index + 1)
        of_layer = self._sums.setdefault((layer.role, layer.index), {})
        total, count = of_layer.get(step.index, (0.0, 0))
        of_layer[step.index] = (total + share, count + 1)
        if parts[0].plan is not None and share < 1.0:
            self._look_at(parts[0].plan, layer, step)

    def layers(self) -> tuple[LayerDensity, ...]:
        return tuple(
            LayerDensity(role, layer, tuple(_mean(steps.get(index)) for index in range(self._num_steps)))
            for (role, layer), steps in sorted(self._sums.items())
        )

    @property
    def picture(self) -> PlanPicture | None:
        """None where every call was dense."""
        return self._picture

    def _look_at(self, plan: CountedPlan, layer: LayerInfo, step: StepInfo) -> None:
        distance = abs(2 * layer.index + 1 - layer.num_layers) / max(1, layer.num_layers)
        distance += abs(2 * step.index + 1 - step.num_steps) / max(1, step.num_steps)
        if self._nearest is not None and distance >= self._nearest:
            return
        self._nearest, kept = distance, plan.kept_blocks(0, 0).cpu()
        num_queries, num_keys = kept.shape
        self._picture = PlanPicture(
            layer.role, layer.index, step.index, 0, plan.method, plan.density, num_queries, num_keys, _cells(kept)
        )


def _mean(counted: tuple[float, int] | None) -> float | None:
    return None if counted is None else counted[0] / counted[1]


def _cells(kept: torch.Tensor) -> tuple[str, ...]:
    """kept: float32 [query blocks, key blocks] on the CPU."""
    from torch.nn.functional import adaptive_avg_pool2d

    size = min(MAX_CELLS, kept.shape[0]), min(MAX_CELLS, kept.shape[1])
    # Any pair at all is at least a 1.
    digits = (adaptive_avg_pool2d(kept[None], size)[0] * 9).ceil().clamp(0, 9).int().tolist()
    return tuple("".join(map(str, row)) for row in digits)
