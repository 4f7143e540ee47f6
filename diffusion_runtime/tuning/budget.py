"""Quality budget: `accuracy>=dense-0.02`, `psnr>=30`, `latent<=0.1`; what a setting may lose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diffusion_runtime.errors import ConfigError, nearest, shown

# Whether more is better. Only figures that dense attention has by itself may be relative to it.
METRICS = {"accuracy": True, "clip": True, "psnr": True, "ssim": True, "lpips": False, "latent": False}
RELATIVE = ("accuracy", "clip")
_BUDGET = re.compile(r"([a-z_]+)\s*(>=|<=)\s*(?:(dense)\s*([+-]\s*[0-9.]+)?|(-?[0-9.]+(?:e-?[0-9]+)?))")

# By metric; of a setting, or of dense attention.
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Budget:
    """One bound on a metric. value: of the metric, or what is added to dense attention's own where it is_relative."""

    metric: str
    value: float
    is_relative: bool = False

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Raises ConfigError that says what is wrong."""
        match = _BUDGET.fullmatch(text.strip().lower())
        if match is None:
            raise ConfigError(
                f"--budget: expected METRIC>=VALUE or METRIC<=VALUE such as 'accuracy>=dense-0.02', 'psnr>=30' or "
                f"'latent<=0.1', got {shown(text)}"
            )
        metric, sense, dense, offset, absolute = match.groups()
        if metric not in METRICS:
            raise ConfigError(f"--budget: unknown metric {shown(metric)}.{nearest(metric, METRICS)}")
        expected = ">=" if METRICS[metric] else "<="
        if sense != expected:
            better = "more" if METRICS[metric] else "less"
            raise ConfigError(f"--budget {text}: {better} {metric} is better; write {metric}{expected}VALUE")
        if dense and metric not in RELATIVE:
            raise ConfigError(
                f"--budget {text}: {metric} is measured from dense attention, which has none of its own; give a number"
            )
        try:
            value = float((offset or "0").replace(" ", "")) if dense else float(absolute)
        except ValueError as error:
            raise ConfigError(f"--budget {text}: expected a number after {sense}") from error
        return cls(metric, value, bool(dense))

    def bound(self, dense: Figures) -> float:
        return dense[self.metric] + self.value if self.is_relative else self.value

    def slack(self, figures: Figures, dense: Figures) -> float:
        """Return how far inside the bound a setting is, in the metric's unit; below 0 where it misses."""
        distance = figures[self.metric] - self.bound(dense)
        return distance if METRICS[self.metric] else -distance

    def is_met(self, figures: Figures, dense: Figures) -> bool:
        # Shares of counted prompts: 15/16 - 0.0625 is 14/16 up to rounding.
        return self.slack(figures, dense) >= -1e-9

    def __str__(self) -> str:
        sense = ">=" if METRICS[self.metric] else "<="
        value = f"dense{self.value:+g}" if self.is_relative else f"{self.value:g}"
        return f"{self.metric}{sense}{value}"


def parse_budgets(texts: Sequence[str]) -> tuple[Budget, ...]:
    """Raises ConfigError for none, for a text that is no budget, and for a metric given twice."""
    if not texts:
        raise ConfigError("--budget: expected what quality may cost, e.g. --budget 'latent<=0.1'")
    budgets = tuple(map(Budget.parse, texts))
    names = [budget.metric for budget in budgets]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--budget: {name} is given twice; give each metric one bound")
    return budgets


def all_met(budgets: Sequence[Budget], figures: Figures, dense: Figures) -> bool:
    return all(budget.is_met(figures, dense) for budget in budgets)


def empty_bounds(budgets: Sequence[Budget], dense: Figures) -> tuple[str, ...]:
    """Return a remark for each bound on accuracy that any setting meets, as clips as given are so bad."""
    return tuple(
        f"{budget}: of the clips as given {dense['accuracy']:.0%} show what they name, so that any setting is within "
        "it; take a size and steps that the model was made for, more prompts, or a metric such as psnr>=25"
        for budget in budgets
        if budget.metric == "accuracy" and budget.bound(dense) <= 0
    )


def least_slack(budgets: Sequence[Budget], figures: Figures, dense: Figures) -> float:
    """Return the least slack of all budgets, each over the size of its bound, as units differ."""
    return min(budget.slack(figures, dense) / (abs(budget.bound(dense)) or 1.0) for budget in budgets)
