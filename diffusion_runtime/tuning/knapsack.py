"""Multiple-choice knapsack, exact: one option for each cell, at the least loss for every total cost.

A dynamic program over the total cost in whole units (Dudzinski and Walukiewicz, 1987): one pass makes the whole Pareto
frontier, along which a search then moves. Greedy by the best ratio reaches only the settings on the frontier's convex
hull; the table is small (cells x options x units), so there is no reason to miss the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The total of the dearest options: costs are exact to a ten-thousandth of it.
UNITS = 10_000


@dataclass(frozen=True)
class Option:
    """One way to run a cell. cost, loss: 0 or more, in any unit."""

    cost: float
    loss: float


@dataclass(frozen=True)
class Selection:
    """picks: by cell, the index of its option. cost, loss: their sums."""

    picks: tuple[int, ...]
    cost: float
    loss: float


# The picks of the cells so far, the last cell's first.
_Chain = tuple[int, "_Chain"] | None


def pareto_frontier(cells: Sequence[Sequence[Option]]) -> list[Selection]:
    """Every selection that none beats in both cost and loss, the dearest first. cells: the options of each.

    Losses add up over cells. Of equal selections the first found stays.
    """
    dearest = sum(max(option.cost for option in options) for options in cells)
    unit = dearest / UNITS if dearest > 0 else 1.0
    best: dict[int, tuple[float, _Chain]] = {0: (0.0, None)}
    for options in cells:
        grown: dict[int, tuple[float, _Chain]] = {}
        steps = [(round(option.cost / unit), option.loss, index) for index, option in enumerate(options)]
        for cost, (loss, chain) in best.items():
            for more, added, index in steps:
                known = grown.get(cost + more)
                if known is None or loss + added < known[0]:
                    grown[cost + more] = (loss + added, (index, chain))
        best = _undominated(grown)
    return [_selection(cells, chain) for _, (_, chain) in sorted(best.items(), reverse=True)]


def _undominated(table: dict[int, tuple[float, _Chain]]) -> dict[int, tuple[float, _Chain]]:
    """Without the entries that cost as much as another, or more, and lose no less."""
    kept: dict[int, tuple[float, _Chain]] = {}
    least = float("inf")
    for cost in sorted(table):
        if table[cost][0] < least:
            kept[cost] = table[cost]
            least = table[cost][0]
    return kept


def _selection(cells: Sequence[Sequence[Option]], chain: _Chain) -> Selection:
    picks: list[int] = []
    while chain is not None:
        index, chain = chain
        picks.append(index)
    picks.reverse()
    chosen = [options[pick] for options, pick in zip(cells, picks, strict=True)]
    return Selection(tuple(picks), sum(each.cost for each in chosen), sum(each.loss for each in chosen))
