"""Named schedules against their definitions, written out here with torch in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tables import table

from diffusion_runtime.denoising.named_schedules import SCHEDULES, NoiseTable, scheduled
from diffusion_runtime.errors import RequestError

SHIFTS = (1.0, 1.15, 3.0, 5.0, 8.0, 12.0, 17.0)


def moved(t: torch.Tensor, shift: float) -> torch.Tensor:
    return shift * t / (1 + (shift - 1) * t)


def quantiles(shares: torch.Tensor) -> torch.Tensor:
    """Of the beta distribution (0.6, 0.6), from its density by the substitution t = sin(u)**2, whose integrand
    2 * (sin u cos u)**0.2 is summed at many points."""
    edges = torch.linspace(0, math.pi / 2, 2_000_001, dtype=torch.float64)
    middles = (edges[1:] + edges[:-1]) / 2
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), (middles.sin() * middles.cos()).pow(0.2).cumsum(0)])
    whole = sums / sums[-1]
    after = torch.searchsorted(whole, shares).clamp(1, len(whole) - 1)
    part = (shares - whole[after - 1]) / (whole[after] - whole[after - 1])
    return (edges[after - 1] + part * (edges[1] - edges[0])).sin() ** 2


def by_definition(name: str, steps: int, shift: float, count: int) -> list[float]:
    table_of = moved(torch.arange(1, count + 1, dtype=torch.float64) / count, shift)
    low, high = float(table_of[0]), float(table_of[-1])
    if name == "simple":
        return [float(table_of[-(1 + int(index * (count / steps)))]) for index in range(steps)]
    if name == "normal":
        return moved(torch.linspace(high, low, steps, dtype=torch.float64), shift).tolist()
    if name == "sgm_uniform":
        return moved(torch.linspace(high, low, steps + 1, dtype=torch.float64), shift)[:-1].tolist()
    if name == "beta":
        shares = 1 - torch.arange(steps, dtype=torch.float64) / steps
        places = (quantiles(shares) * (count - 1)).round().long().tolist()
        return [
            float(table_of[place]) for index, place in enumerate(places) if index == 0 or place != places[index - 1]
        ]
    if name == "kl_optimal":
        share = torch.linspace(0, 1, steps, dtype=torch.float64)
        return (share * math.atan(low) + (1 - share) * math.atan(high)).tan().tolist()
    # Movie Gen's: half of the steps of a thousand linear ones, then a parabola to 0.
    half, threshold = steps // 2, 0.025
    rest = steps - half
    lack = half - threshold * steps
    square = lack / (half * rest**2)
    slope = threshold / half - 2 * lack / rest**2
    lower = [index * threshold / half for index in range(half)]
    upper = [square * index**2 + slope * index + square * half**2 for index in range(half, steps)]
    return [1 - each for each in (*lower, *upper)]


@table("name", SCHEDULES)
@table("steps", [4, 8, 20, 50])
def test_noise_levels_are_those_of_the_definition(name: str, steps: int) -> None:
    for shift in SHIFTS:
        for count in (1000, 10_000):
            found = scheduled(name, steps, NoiseTable(shift, count))
            expected = by_definition(name, steps, shift, count)
            assert found == pytest.approx(expected, abs=1e-6), (shift, count)
            assert found[0] == pytest.approx(1.0, abs=1e-12)
            assert all(before > after > 0 for before, after in itertools.pairwise(found))


def test_one_step_and_unknown_names() -> None:
    assert [scheduled(name, 1, NoiseTable(3.0)) for name in SCHEDULES] == [(1.0,)] * len(SCHEDULES)
    with pytest.raises(RequestError, match="sgm_uniform"):
        scheduled("sgm_unifrom", 4, NoiseTable(3.0))
    with pytest.raises(RequestError, match="1 or more"):
        scheduled("simple", 0, NoiseTable(3.0))
