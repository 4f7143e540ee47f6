"""Sensitivity of cells: the loss of one range of layers and steps that is sparse, and the schedules that follow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.tuning.axes import CellSpecs
from diffusion_runtime.tuning.cells import Cell, schedule_rules
from diffusion_runtime.tuning.clip_metrics import TunedPrompt
from diffusion_runtime.tuning.knapsack import Option, pareto_frontier
from diffusion_runtime.tuning.measurement import Rules
from diffusion_runtime.tuning.plan import Plan
from diffusion_runtime.tuning.search import Point

# (rules, prompt, first step that they change) -> relative L2 distance of the final latents.
Distance = Callable[[Rules, TunedPrompt, int], float]


@dataclass(frozen=True)
class Sensitivity:
    """One cell under one choice. kept: the share of the cell's pairs that is computed. loss: the squared relative L2
    distance of the final latents from dense attention's, with every other cell dense, mean over the prompts."""

    cell: Cell
    spec: AttentionSpec
    kept: float
    loss: float

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.cell.to_dict(),
            **self.spec.to_dict(),
            "kept": round(self.kept, 4),
            "latent_l2": round(self.loss**0.5, 5),
        }


def cells_to_measure(plan: Plan, methods: Sequence[str]) -> list[tuple[Cell, AttentionSpec, float]]:
    """Return every cell with every choice of these methods that leaves something out, and the share that is kept."""
    return [
        (cell, spec, kept)
        for cell in plan.cells
        for method in methods
        for spec in plan.ladders[method]
        if (kept := plan.kept(spec, [cell])) < 1.0
    ]


def sensitivities(
    todo: Sequence[tuple[Cell, AttentionSpec, float]],
    prompts: Sequence[TunedPrompt],
    distance: Distance,
    done: Callable[[], None],
) -> list[Sensitivity]:
    """Return the sensitivity of every cell and choice, with all other cells dense."""
    found: dict[int, list[float]] = {index: [] for index in range(len(todo))}
    # Prompts outermost: the dense clip of one is kept.
    for prompt in prompts:
        for index, (cell, spec, _) in enumerate(todo):
            found[index].append(distance(schedule_rules([(cell, spec)]), prompt, cell.steps.start))
            done()
    return [
        Sensitivity(cell, spec, kept, statistics.fmean(value**2 for value in found[index]))
        for index, (cell, spec, kept) in enumerate(todo)
    ]


def frontier(cells: Sequence[Cell], measured: Sequence[Sensitivity]) -> list[tuple[CellSpecs, Point]]:
    """Return the schedules that none beats in both pairs and loss, from dense to sparse."""
    weights = [cell.weight for cell in cells]
    total = sum(weights)
    options: list[list[Option]] = []
    specs: list[list[AttentionSpec | None]] = []
    for cell, weight in zip(cells, weights, strict=True):
        own = [each for each in measured if each.cell == cell]
        specs.append([None, *(each.spec for each in own)])
        options.append([Option(weight / total, 0.0), *(Option(each.kept * weight / total, each.loss) for each in own)])
    found = []
    for selection in pareto_frontier(options):
        chosen = tuple((cell, own[pick]) for cell, own, pick in zip(cells, specs, selection.picks, strict=True))
        found.append((chosen, Point(schedule_rules(chosen), selection.cost, selection.loss)))
    return found
