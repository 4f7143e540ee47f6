"""Samplers of k-diffusion and ComfyUI, as these compute them for flow matching: x = (1 - sigma) * x0 + sigma * eps.

Multistep methods here are in t = -log(sigma), those that add noise (but euler_ancestral) in the half logarithm of the
signal-to-noise ratio, log((1 - sigma) / sigma).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from diffusion_runtime.denoising.level_sampler import Draw, Estimate, History, LevelSampler

# Where a noise level of 1, whose signal-to-noise ratio is 0, is moved to.
_BELOW_ONE = 1 - 1e-4
# What is kept of earlier steps: the estimate of the data, or several, the newest at the end.
_DATA = "data"
_ESTIMATES = ("data_2", "data_1", _DATA)


class EulerAncestralSampler(LevelSampler):
    """Euler steps to a level below the next one, and fresh noise up to it (ancestral, eta 1, for rectified flow)."""

    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        del history
        *_, level, following = levels
        data = estimate(latents, level)
        if following == 0:
            return data
        down = following * following / level
        latents = down / level * latents + (1 - down / level) * data
        signal = (1 - following) / (1 - down)
        return signal * latents + math.sqrt(following**2 - (down * signal) ** 2) * draw()


class DpmPlusPlus2MSampler(LevelSampler):
    """DPM-Solver++ 2M (Lu et al. 2022, arXiv:2211.01095) in -log(sigma)."""

    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        del draw
        *earlier, level, following = levels
        data = guess = estimate(latents, level)
        before = history.get(_DATA)
        if before is not None and following > 0:
            ratio = math.log(earlier[-1] / level) / math.log(level / following)
            guess = (1 + 1 / (2 * ratio)) * data - before / (2 * ratio)
        history[_DATA] = data
        left = following / level
        return left * latents + (1 - left) * guess


class ResMultistepSampler(LevelSampler):
    """Second-order exponential integrator with the estimate before (RES, refined exponential solver, Zhang et al.,
    arXiv:2308.02157), without noise."""

    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        del draw
        *earlier, level, following = levels
        data = estimate(latents, level)
        left, before = following / level, history.get(_DATA)
        if before is None or following == 0:
            result = left * latents + (1 - left) * data
        else:
            width = math.log(level / following)
            place = -math.log(earlier[-1] / level) / width
            first = -math.expm1(-width) / width
            second = (first - 1) / -width
            result = left * latents + width * ((first - second / place) * data + second / place * before)
        history[_DATA] = data
        return result


class UniPCSigmaSampler(LevelSampler):
    """UniPC of order 3 (Zhao et al., arXiv:2302.04867, B(h) = h) in -log(sigma). It ends at a noise level of 0.001,
    whose signal is brought to 1."""

    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        del draw
        highest, last = max(min(3, self.num_steps - 1), 1), 0.001
        *earlier, level, following = levels
        index, data = len(levels) - 2, estimate(latents, level)
        # The newest at the end, as the levels.
        kept = [history[name] for name in _ESTIMATES if name in history]
        estimates = list(zip(earlier[len(earlier) - len(kept) :], kept, strict=True))
        if estimates:
            # The corrector of the step before, with the estimate at what it predicted.
            order = min(highest, index, self.num_steps + 1 - index)
            latents = _unipc(history["start"], estimates, level, order, data)
        estimates = [*estimates, (level, data)][-3:]
        history.update(zip(_ESTIMATES[-len(estimates) :], (each for _, each in estimates), strict=True))
        history["start"] = latents
        order = min(highest, index + 1, self.num_steps - index)
        if following > 0:
            return _unipc(latents, estimates, following, order, None)
        return _unipc(latents, estimates, last, 1, None) / (1 - last)


def _unipc(
    latents: torch.Tensor,
    history: list[tuple[float, torch.Tensor]],
    level: float,
    order: int,
    estimated: torch.Tensor | None,
) -> torch.Tensor:
    """Take latents from the last level of a history to another: the predictor, or with an estimate the corrector."""
    at, data = history[-1]
    width = -math.log(at / level)
    earlier = history[-2 : -order - 1 : -1]
    places = [math.log(at / other) / -width for other, _ in earlier]
    slopes = [(value - data) / place for place, (_, value) in zip(places, earlier, strict=True)]
    if estimated is not None:
        places, slopes = [*places, 1.0], [*slopes, estimated - data]
    result = level / at * latents - math.expm1(width) * data
    if not slopes:
        return result
    if len(slopes) == 1:
        weights = [0.5]
    else:
        # Row i has the powers i of the places, and the right side the moments of the exponential.
        sides, moment, factorial = [], math.expm1(width) / width - 1, 1
        for index in range(len(slopes)):
            sides.append(moment * factorial / width)
            factorial *= index + 2
            moment = moment / width - 1 / factorial
        rows = torch.tensor([[place**index for place in places] for index in range(len(places))], dtype=torch.float64)
        weights = torch.linalg.solve(rows, torch.tensor(sides, dtype=torch.float64)).tolist()
    for weight, slope in zip(weights, slopes, strict=True):
        result = result - width * weight * slope
    return result


def _ratio(level: float) -> float:
    """Return noise over signal."""
    return level / (1 - level)


@dataclass(frozen=True)
class _NoisySampler(LevelSampler):
    """A sampler in noise over signal, which a first level of 1 has none of."""

    @property
    def levels(self) -> tuple[float, ...]:
        first, *others = super().levels
        return (min(first, _BELOW_ONE), *others)


# Points at which the integrals below are summed.
_NUM_POINTS = 200


def _spread(ratio: float) -> float:
    """Return how much noise the reverse process carries at a ratio (ER-SDE's noise scaler)."""
    return ratio * (math.exp(ratio**0.3) + 10.0)


class ErSdeSampler(_NoisySampler):
    """ER-SDE-Solver-3 (Cui et al., arXiv:2309.06169): Taylor's third order of the estimate, with fresh noise."""

    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        *earlier, level, following = levels
        data = estimate(latents, level)
        if following == 0:
            return data
        here, there = _ratio(level), _ratio(following)
        share = _spread(there) / _spread(here)
        result = (1 - following) / (1 - level) * share * latents + (1 - following) * (1 - share) * data
        before, slope_before = history.get(_DATA), history.get("slope")
        if before is not None:
            width = there - here
            points = [there - width * index / _NUM_POINTS for index in range(_NUM_POINTS)]
            summed = sum(1 / _spread(point) for point in points) * -width / _NUM_POINTS
            slope = (data - before) / (here - _ratio(earlier[-1]))
            result = result + (1 - following) * (width + summed * _spread(there)) * slope
            if slope_before is not None:
                summed = sum((point - here) / _spread(point) for point in points) * -width / _NUM_POINTS
                bend = (slope - slope_before) / ((here - _ratio(earlier[-2])) / 2)
                result = result + (1 - following) * (width**2 / 2 + summed * _spread(there)) * bend
            history["slope"] = slope
        history[_DATA] = data
        deviation = math.sqrt(max(there**2 - (here * share) ** 2, 0.0))
        return result + (1 - following) * deviation * draw()


class DpmPlusPlusSdeSampler(_NoisySampler):
    """DPM-Solver++ (SDE), second order by a second prediction half-way in the logarithm of the ratio; its noise is that
    of one Brownian path."""

    def between(self, level: float, following: float) -> float | None:
        if following == 0:
            return None
        half = math.sqrt(_ratio(level) * _ratio(following))
        return half / (1 + half)

    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        del history
        *_, level, following = levels
        data = estimate(latents, level)
        middle = self.between(level, following)
        if middle is None:
            return data
        first, second = draw(), draw()
        ahead = _ancestral(latents, data, level, middle, first)
        better = estimate(ahead, middle)
        # The Brownian path's increment over the whole step, of which the first one is a part.
        parts = [math.sqrt(abs(after - before)) for before, after in pairwise((level, middle, following))]
        path = (parts[0] * first + parts[1] * second) / math.hypot(*parts)
        return _ancestral(latents, better, level, following, path)


def _ancestral(
    latents: torch.Tensor, data: torch.Tensor, level: float, following: float, fresh: torch.Tensor
) -> torch.Tensor:
    """Take latents to a ratio below that of the next level, and add noise up to it."""
    here, there = _ratio(level), _ratio(following)
    up = min(there, math.sqrt(there**2 * (here**2 - there**2) / here**2))
    down = math.sqrt(there**2 - up**2)
    kept = down / here
    signal = 1 - following
    return signal / (1 - level) * kept * latents + signal * (1 - kept) * data + signal * up * fresh
