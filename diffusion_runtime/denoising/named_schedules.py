"""Named noise schedules of flow matching, as ComfyUI computes them from a model's table of noise levels: simple,
normal, sgm_uniform, beta (arXiv:2407.12173), linear_quadratic (Movie Gen, arXiv:2410.13720), kl_optimal
(arXiv:2404.14507)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diffusion_runtime.denoising.flow_schedule import LinearQuadraticSigmas, shifted
from diffusion_runtime.errors import RequestError, nearest

# Of `beta`, both of its distribution.
_ALPHA = 0.6


@dataclass(frozen=True)
class NoiseTable:
    """Noise levels of a model's training after a flow shift: of (i + 1) / num_levels, from the lowest up."""

    flow_shift: float
    num_levels: int = 1000

    def level(self, index: int) -> float:
        return shifted((index + 1) / self.num_levels, self.flow_shift)

    @property
    def lowest(self) -> float:
        return self.level(0)


def scheduled(name: str, num_steps: int, table: NoiseTable) -> tuple[float, ...]:
    """Return the noise levels of the steps, without the 0 behind the last one. `beta` leaves out a level that comes
    twice in a row, and has fewer steps then. Raises RequestError for an unknown name, and for fewer than one step."""
    if name not in SCHEDULES:
        raise RequestError(f"schedule: unknown value {name!r}.{nearest(name, SCHEDULES)}")
    if num_steps < 1:
        raise RequestError(f"num_inference_steps: expected 1 or more, got {num_steps}")
    return SCHEDULES[name](num_steps, table)


def _simple(num_steps: int, table: NoiseTable) -> tuple[float, ...]:
    stride = table.num_levels / num_steps
    return tuple(table.level(table.num_levels - 1 - int(index * stride)) for index in range(num_steps))


def _normal(num_steps: int, table: NoiseTable) -> tuple[float, ...]:
    """Evenly from 1 to the lowest level, which is shifted already, and all of them shifted."""
    width = (1 - table.lowest) / max(num_steps - 1, 1)
    return tuple(shifted(1 - index * width, table.flow_shift) for index in range(num_steps))


def _sgm_uniform(num_steps: int, table: NoiseTable) -> tuple[float, ...]:
    """The same in one step more, without the last."""
    return _normal(num_steps + 1, table)[:-1]


def _beta(num_steps: int, table: NoiseTable) -> tuple[float, ...]:
    indices = [round(_beta_quantile(1 - index / num_steps) * (table.num_levels - 1)) for index in range(num_steps)]
    kept = [each for place, each in enumerate(indices) if place == 0 or each != indices[place - 1]]
    return tuple(table.level(index) for index in kept)


def _linear_quadratic(num_steps: int, table: NoiseTable) -> tuple[float, ...]:
    del table
    return LinearQuadraticSigmas().sigmas(num_steps)


def _kl_optimal(num_steps: int, table: NoiseTable) -> tuple[float, ...]:
    if num_steps == 1:
        return (1.0,)
    low, high = math.atan(table.lowest), math.atan(1.0)
    shares = [index / (num_steps - 1) for index in range(num_steps)]
    return tuple(math.tan(share * low + (1 - share) * high) for share in shares)


SCHEDULES: Mapping[str, Callable[[int, NoiseTable], tuple[float, ...]]] = {
    "simple": _simple,
    "normal": _normal,
    "sgm_uniform": _sgm_uniform,
    "beta": _beta,
    "linear_quadratic": _linear_quadratic,
    "kl_optimal": _kl_optimal,
}


def _beta_quantile(share: float) -> float:
    """Return where the cumulative beta distribution with both parameters _ALPHA is `share`, by bisection."""
    if share > 0.5:
        # It is symmetric, and values near 0 are exact where those near 1 are not.
        return 1 - _beta_quantile(1 - share)
    low, high = 0.0, 1.0
    # As many as halve an interval to the distance of neighbouring float64.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_cumulative(middle) < share else (low, middle)
    return (low + high) / 2


def _beta_cumulative(value: float) -> float:
    """Return the regularised incomplete beta function for both parameters _ALPHA, by its continued fraction (modified
    Lentz's method, Numerical Recipes 6.4)."""
    if value <= 0 or value >= 1:
        return min(max(value, 0.0), 1.0)
    if value > 0.5:
        return 1 - _beta_cumulative(1 - value)
    front = (
        math.exp(math.lgamma(2 * _ALPHA) - 2 * math.lgamma(_ALPHA) + _ALPHA * math.log(value * (1 - value))) / _ALPHA
    )
    upper, lower = 1.0, 1 / (1 - 2 * _ALPHA * value / (_ALPHA + 1))
    fraction = lower
    for step in range(1, 200):
        double = _ALPHA + 2 * step
        for factor in (
            step * (_ALPHA - step) * value / ((double - 1) * double),
            -(_ALPHA + step) * (2 * _ALPHA + step) * value / (double * (double + 1)),
        ):
            lower = 1 / (1 + factor * lower)
            upper = 1 + factor / upper
            fraction *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    return front * fraction
