"""Step cache settings: the methods (EasyCache, ...), their options, and their text form `easycache:threshold=0.1`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from diffusion_runtime.core.options import NONE, MethodSettings
from diffusion_runtime.errors import RequestError, nearest, shown

# Samplers of distilled models: every step of so few changes too much to be left out.
FEW_STEPS = 8


@dataclass(frozen=True)
class EasyCacheOptions:
    """EasyCache (Zhou et al., arXiv:2507.02860).

    threshold: steps are reused while the accumulated estimate of the relative change stays below it; 0 computes all.
    warmup: the share of the steps, from the first on, that are always computed, rounded up; 10 of 50 in the paper's
    setting for Wan. force: run with FEW_STEPS steps or fewer as well.
    """

    threshold: float = 0.05
    warmup: float = 0.2
    force: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 10:
            raise ValueError(f"threshold: expected a number from 0 to 10, got {self.threshold:g}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup: expected a share of the steps from 0 to 1, got {self.warmup:g}")


# Step masks of 28 steps as Cache-DiT publishes them: lengths of computed and of cached runs, in turns.
STEP_MASKS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = MappingProxyType(
    {
        "slow": ((8, 3, 3, 2, 1, 1), (1, 2, 2, 2, 3)),
        "medium": ((6, 2, 2, 2, 2, 1), (1, 3, 3, 3, 3)),
        "fast": ((6, 1, 1, 1, 1, 1), (1, 3, 4, 5, 4)),
        "ultra": ((4, 1, 1, 1, 1), (2, 5, 6, 7)),
    }
)


@dataclass(frozen=True)
class DBCacheOptions:
    """DBCache (Cache-DiT), the first-block cache of ParaAttention for F=1; names as Cache-DiT has them.

    F: first blocks, always computed, whose residual is compared with that of the last computed step. B: last blocks,
    always computed. W: steps that are computed first. R: residuals that differ by less, relative to their mean, let the
    blocks between be reused. MC: at most so many reused steps in a row, -1 for any number. mask: which steps may be
    reused: none (all), a name of STEP_MASKS, stretched to the steps there are, or [1,1,0,...] with 1 for a step that is
    computed. policy: dynamic compares residuals at the steps that the mask leaves open, static reuses them all. taylor:
    the order of the forecast of what is reused, from 0 (as it was) to 2. force: run with FEW_STEPS steps or fewer too.
    """

    F: int = 8
    B: int = 0
    W: int = 8
    R: float = 0.08
    MC: int = -1
    mask: str | tuple[int, ...] = NONE
    policy: Literal["dynamic", "static"] = "dynamic"
    taylor: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("F", 1), ("B", 0), ("W", 0), ("MC", -1), ("taylor", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}: expected {minimum} or more, got {getattr(self, name)}")
        if self.taylor > 2:
            raise ValueError(f"taylor: expected an order from 0 to 2, got {self.taylor}")
        if not 0 <= self.R <= 10:
            raise ValueError(f"R: expected a number from 0 to 10, got {self.R:g}")
        if isinstance(self.mask, str) and self.mask not in (NONE, *STEP_MASKS):
            raise ValueError(f"mask: unknown value {shown(self.mask)}.{nearest(self.mask, (NONE, *STEP_MASKS))}")
        if not isinstance(self.mask, str) and set(self.mask) - {0, 1}:
            raise ValueError("mask: expected 1 for a computed step and 0 for another, as in [1,1,0]")
        if self.mask == NONE and self.policy == "static":
            raise ValueError("policy: static needs a mask")

    def check_blocks(self, num_blocks: int) -> None:
        """Raises RequestError where F and B leave no block of a model to reuse."""
        if num_blocks <= self.F + self.B:
            raise RequestError(
                f"step_cache: dbcache: expected F + B below this model's {num_blocks} blocks, got F={self.F}, "
                f"B={self.B}; say dbcache:F=1, or use easycache"
            )

    def may_reuse(self, num_steps: int) -> tuple[bool, ...]:
        """For each step whether the mask leaves it open. Raises RequestError for a mask of another length."""
        if self.mask == NONE:
            return (True,) * num_steps
        if isinstance(self.mask, str):
            computed, cached = STEP_MASKS[self.mask]
            runs = [run for pair in itertools.zip_longest(computed, cached, fillvalue=0) for run in pair]
            whole = [index % 2 == 1 for index, run in enumerate(runs) for _ in range(run)]
            return tuple(whole[index * len(whole) // num_steps] for index in range(num_steps))
        if len(self.mask) != num_steps:
            raise RequestError(f"step_cache: dbcache.mask: expected {num_steps} steps, got {len(self.mask)}")
        return tuple(value == 0 for value in self.mask)


@dataclass(frozen=True)
class MagCacheOptions:
    """MagCache (Ma et al., github.com/Zehong-Ma/MagCache).

    file: the calibration of this model, which `diffusion-runtime calibrate` writes. threshold: steps are reused while
    the accumulated error stays below it. K: at most so many in a row. retention: the share of the steps, from the first
    on, that are always computed, rounded up. force: run with FEW_STEPS steps or fewer too.
    """

    file: str = ""
    threshold: float = 0.06
    K: int = 3
    retention: float = 0.2
    force: bool = False

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError(
                "file: a calibration of this very model is needed: magcache:file=FILE; `diffusion-runtime calibrate` "
                "measures one"
            )
        if not 0 <= self.threshold <= 10:
            raise ValueError(f"threshold: expected a number from 0 to 10, got {self.threshold:g}")
        if self.K < 0:
            raise ValueError(f"K: expected 0 or more, got {self.K}")
        if not 0 <= self.retention <= 1:
            raise ValueError(f"retention: expected a share of the steps from 0 to 1, got {self.retention:g}")


# The degree of TeaCache's polynomials is one less.
NUM_COEFFICIENTS = 5


@dataclass(frozen=True)
class TeaCacheOptions:
    """TeaCache (Liu et al., arXiv:2411.19108).

    file: a calibration of this model, which `diffusion-runtime calibrate` writes; "" takes the coefficients that
    TeaCache's authors published for this very model. threshold: steps are reused while the accumulated estimate stays
    below it; None is the smallest that is documented for the coefficients, CALIBRATED_THRESHOLD for a file's.
    use_ret_steps: the authors' second variant for Wan, which compares the projected time embedding and computes the
    first RET_STEPS steps. force: run with FEW_STEPS steps or fewer too.
    """

    file: str = ""
    threshold: float | None = None
    use_ret_steps: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 10:
            raise ValueError(f"threshold: expected a number from 0 to 10, got {self.threshold:g}")


# Steps that are always computed first with use_ret_steps; one without.
RET_STEPS = 5
# Of the relative change of the output, which a calibration's polynomial estimates.
CALIBRATED_THRESHOLD = 0.1


@dataclass(frozen=True)
class TeaCachePolynomial:
    """From the relative change of what TeaCache compares to that of the model's output. coefficients: NUM_COEFFICIENTS,
    the highest power first. threshold: where the options say none; None for one that nobody documented."""

    coefficients: tuple[float, ...]
    threshold: float | None

    def __call__(self, change: float) -> float:
        value = 0.0
        for coefficient in self.coefficients:
            value = value * change + coefficient
        return value


@dataclass(frozen=True)
class TeaCachePolynomials:
    """The polynomials of one model. of_ret_steps: of the variant `use_ret_steps`, None where the model has none.
    models, source: what they are for, and who measured them."""

    models: str
    source: str
    plain: TeaCachePolynomial
    of_ret_steps: TeaCachePolynomial | None = None


@dataclass(frozen=True)
class StepCacheSettings(MethodSettings):
    """Which steps are reused, with the method's options: `easycache` or `easycache:threshold=0.1,warmup=0.2`."""

    field = "step_cache"
    methods = MappingProxyType(
        {
            "easycache": EasyCacheOptions,
            "dbcache": DBCacheOptions,
            "teacache": TeaCacheOptions,
            "magcache": MagCacheOptions,
        }
    )

    def check_steps(self, num_steps: int) -> None:
        """Raises RequestError for a few-step sampler, unless forced."""
        if num_steps <= FEW_STEPS and not self.options.force:
            raise RequestError(
                f"step_cache: expected more than {FEW_STEPS} steps, got {num_steps}: each of so few steps matters; "
                f"leave the cache out, use more steps, or say {self.method}:force=true"
            )
        if isinstance(self.options, DBCacheOptions):
            self.options.may_reuse(num_steps)

    @property
    def decides_per_branch(self) -> bool:
        """True where each guidance branch has a decision of its own, and so a forward pass."""
        return isinstance(self.options, DBCacheOptions | MagCacheOptions | TeaCacheOptions)
