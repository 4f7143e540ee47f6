"""Plots of a comparison as values for inline SVG: distance by step, quality against time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.comparison.result import Comparison, Row

# At least 4.5 : 1 against white, and told apart with red-green blindness by their lightness and marks.
COLOURS = ("#0b5cad", "#b3420b", "#1a7f37", "#7d3cb5", "#8a5a00", "#00707a", "#a1124f", "#4d4d4d")
_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 44
_NUM_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """Values from low to high along a line of `length` that begins at `start`; up: towards smaller coordinates."""

    low: float
    high: float
    start: float
    length: float
    up: bool = False

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + self.length * (1 - share if self.up else share), 1)

    def ticks(self) -> list[tuple[float, str]]:
        step = _round_step((self.high - self.low) / _NUM_TICKS)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [(self.at(index * step), f"{index * step:.6g}") for index in range(first, last + 1)]


def _round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten, at least `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * (1 - 1e-9))


def colour_of(rows: Sequence[Row]) -> Mapping[int, str]:
    """Return a colour by position; a row of fewer steps has the colour of the reference, whose setting it is."""
    colours: dict[int, str] = {}
    for position, row in enumerate(rows):
        is_new = row.kind != "fewer_steps"
        colours[position] = COLOURS[sum(1 for each in rows[:position] if each.kind != "fewer_steps") % len(COLOURS)]
        if not is_new:
            colours[position] = COLOURS[0]
    return colours


def _axes(x: tuple[float, float], y: tuple[float, float]) -> tuple[Axis, Axis]:
    across = Axis(x[0], x[1] if x[1] > x[0] else x[0] + 1, _LEFT, _WIDTH - _LEFT - _RIGHT)
    upwards = Axis(y[0], y[1] if y[1] > y[0] else y[0] + 1, _TOP, _HEIGHT - _TOP - _BOTTOM, up=True)
    return across, upwards


def _frame(across: Axis, upwards: Axis, names: tuple[str, str]) -> dict[str, Any]:
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": _HEIGHT - _BOTTOM,
        "x_ticks": across.ticks(),
        "y_ticks": upwards.ticks(),
        "x_name": names[0],
        "y_name": names[1],
    }


def divergence_plot(result: Comparison, letters: Sequence[str]) -> dict[str, Any] | None:
    """Relative L2 of the latents by step; None where no setting can be compared step by step."""
    colours = colour_of(result.rows)
    drawn = [
        (position, [(step, value) for step, value in enumerate(row.latent_l2) if value is not None])
        for position, row in enumerate(result.rows)
        if row.kind == "setting"
    ]
    drawn = [(position, points) for position, points in drawn if points]
    if not drawn:
        return None
    steps = max(step for _, points in drawn for step, _ in points)
    top = max(result.threshold, *(value for _, points in drawn for _, value in points)) * 1.05
    across, upwards = _axes((0, max(1, steps)), (0, top))
    return {
        **_frame(across, upwards, ("step", "relative L2 of the latents")),
        "threshold": upwards.at(result.threshold),
        "lines": [
            {
                "letter": letters[position],
                "colour": colours[position],
                "name": result.rows[position].name,
                "points": [
                    {"x": across.at(step), "y": upwards.at(value), "text": f"step {step}: {value:.4g}"}
                    for step, value in points
                ],
            }
            for position, points in drawn
        ],
    }


def quality_plot(result: Comparison, letters: Sequence[str]) -> dict[str, Any] | None:
    """PSNR against seconds of one clip; None without two points."""
    colours = colour_of(result.rows)
    points = [
        (position, seconds, quality)
        for position, row in enumerate(result.rows)
        if (seconds := row.total_seconds) is not None and (quality := row.metric("psnr_db")) is not None
    ]
    reference = result.reference.total_seconds
    if not points or reference is None:
        return None
    lowest, highest = min(quality for *_, quality in points), max(quality for *_, quality in points)
    margin = max(1.0, 0.1 * (highest - lowest))
    most = max(reference, *(seconds for _, seconds, _ in points))
    across, upwards = _axes((0, 1.05 * most), (lowest - margin, highest + margin))
    drawn = [
        {
            "letter": letters[position],
            "colour": colours[position],
            "is_fewer": result.rows[position].kind == "fewer_steps",
            "x": across.at(seconds),
            "y": upwards.at(quality),
            "text": f"{result.rows[position].name}: {quality:.1f} dB, {seconds:.3g} s",
        }
        for position, seconds, quality in points
    ]
    baseline = sorted((each for each in drawn if each["is_fewer"]), key=lambda each: float(str(each["x"])))
    return {
        **_frame(across, upwards, ("seconds of one clip", "PSNR, dB")),
        "reference": across.at(reference),
        "points": drawn,
        "baseline": " ".join(f"{each['x']},{each['y']}" for each in baseline),
    }
