"""Search along a line of settings from dense to sparse: the sparsest that a budget allows, then verified on other
prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.tuning.measurement import Figures, Rules


@dataclass(frozen=True)
class Point:
    """A setting. kept: the share of self-attention's pairs that it computes; loss: predicted from the cells, None where
    none was."""

    rules: Rules
    kept: float
    loss: float | None = None


@dataclass(frozen=True)
class Outcome:
    """point: that was verified last; measured, verified: its figures on either prompts, None where it was not run.
    is_met: whether the budget holds on the prompts for verification. stepped_back: how many sparser points missed it
    there."""

    point: Point
    measured: Figures | None
    verified: Figures | None
    is_met: bool
    stepped_back: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "attention": list(self.point.rules),
            "kept": round(self.point.kept, 4),
            "predicted_latent_l2": None if self.point.loss is None else round(self.point.loss**0.5, 4),
            "budget_met": self.is_met,
            "stepped_back": self.stepped_back,
            "measured": None if self.measured is None else self.measured.to_dict(),
            "verified": None if self.verified is None else self.verified.to_dict(),
        }


Evaluate = Callable[[Point], Figures]
IsMet = Callable[[Figures], bool]
# How far within a budget figures are; below 0 where they miss it.
Slack = Callable[[Figures], float]


def search(
    points: Sequence[Point],
    measure: Evaluate,
    is_met: IsMet,
    verify: Evaluate,
    is_verified: IsMet,
    slack: Slack,
) -> Outcome:
    """points: the dense one first, each sparser than the one before.

    The sparsest point within the budget by bisection on the prompts that were measured, as quality falls from point to
    point; then from there back towards dense until it holds on the prompts for verification. Where only dense does, the
    outcome is the sparse point that was nearest on the prompts for verification, with its figures, not met.
    """
    measured: dict[int, Figures] = {}
    low, high = 0, len(points) - 1
    while low < high:
        middle = (low + high + 1) // 2
        measured[middle] = measure(points[middle])
        if is_met(measured[middle]):
            low = middle
        else:
            high = middle - 1
    if len(points) == 1:
        return Outcome(points[0], None, None, False)
    verified: dict[int, Figures] = {}
    # Where the measured prompts allow no sparse point, the densest has figures all the same.
    for stepped_back, index in enumerate(range(low, 0, -1) if low else [1]):
        verified[index] = verify(points[index])
        if is_verified(verified[index]):
            return Outcome(points[index], measured.get(index), verified[index], True, stepped_back)
    nearest = max(verified, key=lambda index: slack(verified[index]))
    return Outcome(points[nearest], measured.get(nearest), verified[nearest], False, low)


def best_of(outcomes: Mapping[str, Outcome], slack: Slack) -> str:
    """The name of the sparsest within the budget; where none is, of the nearest. Of equal ones the first."""
    met = [name for name, outcome in outcomes.items() if outcome.is_met]
    if met:
        return min(met, key=lambda name: outcomes[name].point.kept)

    def nearness(name: str) -> float:
        verified = outcomes[name].verified
        return float("-inf") if verified is None else slack(verified)

    return max(outcomes, key=nearness)


def thinned(points: Sequence[Point], count: int) -> list[Point]:
    """At most `count` of them, the ends among them, as evenly spaced in `kept` as there are points."""
    if len(points) <= count:
        return list(points)
    first, last = points[0].kept, points[-1].kept
    chosen = {_nearest(points, first + (last - first) * index / (count - 1)) for index in range(count)}
    return [points[index] for index in sorted(chosen)]


def _nearest(points: Sequence[Point], kept: float) -> int:
    return min(range(len(points)), key=lambda index: abs(points[index].kept - kept))
