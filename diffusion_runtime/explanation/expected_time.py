"""Expected time: seconds per stage of a generation, from figures that `bench generate` measured on this machine.

A size that was measured has its own figure. Between measured sizes a sum is fitted, no term of it negative: for
denoising, so much for each forward pass, each token in it and, from three sizes on, each pair of a token and a key; for
decoding the same of latent frames and their pixels; for writing, a constant, a linear and a quadratic term in pixels.
What the first generation of a process takes more was measured once per size: a constant and a linear term through all
sizes. Nothing is said beyond the measured sizes, or of other settings.
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from diffusion_runtime.explanation.stage_times import (
    DECODE,
    DENOISE,
    STAGES,
    TEXT,
    WRITE,
    Measured,
    StageTimes,
    Work,
    how_of,
    options_of,
    size_of,
    works_of,
)
from diffusion_runtime.generation.interface import GenerationRules
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.request_rules import RequestRules

_LEAST_SHOWN = 0.001


@dataclass(frozen=True)
class ExpectedTime:
    """The expectation of one generation. seconds: by stage, without those that nothing is known of. per_step: seconds
    of a denoising step, None where unknown; num_steps: so many. once: seconds of denoising beside the steps, which the
    first generation of a process has more of. basis: the measured sizes that the figures rest on; advice: what measures
    the others, empty where all stages are known."""

    seconds: Mapping[str, float]
    num_steps: int
    per_step: float | None = None
    once: float = 0.0
    basis: str = ""
    advice: str = ""

    @property
    def total(self) -> float | None:
        """The sum of all stages; None where one is unknown."""
        return None if self.advice else sum(self.seconds.values())

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows to show: name and value."""
        rows = []
        for stage in STAGES:
            seconds = self.seconds.get(stage)
            text = "not measured on this machine" if seconds is None else seconds_text(seconds)
            if stage == DENOISE and seconds is not None and self.per_step is not None:
                once = f" + {seconds_text(self.once)} once" if self.once >= _LEAST_SHOWN else ""
                text = f"{text}: {self.num_steps} x {seconds_text(self.per_step)}{once}"
            rows.append((stage, text))
        if self.total is not None:
            rows.append(("together", seconds_text(self.total)))
        if self.seconds:
            rows.append(("rests on", self.basis))
        if self.advice:
            rows.append(("to measure", self.advice))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values."""
        return {
            "seconds": {name: round(each, 4) for name, each in self.seconds.items()},
            "num_steps": self.num_steps,
            "seconds_per_step": self.per_step,
            "seconds_once": self.once,
            "basis": self.basis,
            "advice": self.advice,
        }


def expected_time(
    recipe: Mapping[str, Any],
    rules: GenerationRules,
    request: GenerationRequest,
    file_format: str,
    *,
    is_first: bool = True,
    is_offloaded: bool = False,
    num_done: int = 0,
) -> ExpectedTime:
    """Return the expectation of a resolved request. recipe: of PipelineDescription.to_dict, on this machine. is_first:
    whether it is the first of its process, which also imports, allocates and compiles. is_offloaded: whether weights
    wait in the machine's memory. num_done: steps that saved latents have behind them."""
    model_path = recipe["runtime"]["model_path"]
    how = how_of(recipe, rules, request, is_offloaded=is_offloaded)
    rows = [each for each in StageTimes(recipe, model_path).read() if each.how == how]
    num_steps, size = max(0, (request.num_inference_steps or 1) - num_done), size_of(request)
    step_work, once_work = works_of(rules, request)
    pixels = math.prod(size)

    def first(stage: str, value: float | None) -> float | None:
        """Add what the first generation takes more."""
        return value if value is None or not is_first else value + _first_extra(rows, stage, pixels)

    def warm(stage: str, of: Sequence[Measured], terms_of: Callable[[tuple[int, int, int]], Terms]) -> float | None:
        return fitted([Point(terms_of(row.size), row.warm[stage]) for row in of if stage in row.warm], terms_of(size))

    def of_frames(size: tuple[int, int, int]) -> Terms:
        """A decoder goes from latent frame to latent frame: so much for each, for its pixels, and for their square."""
        frames, height, width = size
        factor = rules.sampling.geometry.temporal_factor if isinstance(rules, RequestRules) else 1
        num_latents = max(1, (frames - 1) // factor + 1)
        return float(num_latents), float(num_latents * height * width), float(num_latents * (height * width) ** 2)

    seconds: dict[str, float | None] = {}
    texts = [value for row in rows if (value := (row.cold if is_first else row.warm).get(TEXT)) is not None]
    seconds[TEXT] = statistics.median(texts) if texts else None
    timed = [(row, row.num_steps * step, row.warm[DENOISE]) for row in rows if (step := _per_step(row)) is not None]
    in_steps = passes_time([(row, row.step_work, spent, spent) for row, spent, _ in timed], step_work, size)
    # The difference of two times, with the errors of both: it may be 0 at a size.
    beside = [(row, row.once_work, max(0.0, spent - in_steps), spent) for row, in_steps, spent in timed]
    once = first(DENOISE, passes_time(beside, once_work, size))
    per_step = None if in_steps is None else in_steps / (request.num_inference_steps or 1)
    seconds[DENOISE] = None if per_step is None or once is None else num_steps * per_step + once
    seconds[DECODE] = first(DECODE, warm(DECODE, rows, of_frames))
    of_format = [row for row in rows if row.file_format == file_format]
    seconds[WRITE] = first(WRITE, warm(WRITE, of_format, lambda size: powers(math.prod(size))))
    known = {name: value for name, value in seconds.items() if value is not None}
    # The text encoder is left out of random weights; what is to be measured is the model itself then.
    return ExpectedTime(
        known,
        num_steps,
        per_step,
        once or 0.0,
        _basis(rows),
        "" if len(known) == len(STAGES) else _advice(model_path, size, options_of(recipe, rules, request)),
    )


def planned_times(
    description: PipelineDescription,
    requests: Sequence[GenerationRequest],
    format_of: Callable[[GenerationRequest], str],
    num_done: Sequence[int] = (),
) -> list[ExpectedTime]:
    """Return the expectation of each resolved request of one process, of which the first one warms it up; none for a
    device that is not here. format_of: the format of a request's file."""
    if description.planned_on is not None:
        return []
    recipe = description.to_dict()
    return [
        expected_time(
            recipe,
            description.rules,
            request,
            format_of(request),
            is_first=index == 0,
            is_offloaded=description.is_offloaded,
            num_done=num_done[index] if num_done else 0,
        )
        for index, request in enumerate(requests)
    ]


Terms = tuple[float, ...]


class Point(NamedTuple):
    """A measured value. terms: what it grows with, of which it is a sum with unknown factors. scale: of its error;
    None for the value itself."""

    terms: Terms
    value: float
    scale: float | None = None


def powers(size: float) -> Terms:
    """Return the terms of a quadratic curve at a size."""
    return 1.0, float(size), float(size) ** 2


def passes_time(
    measured: Sequence[tuple[Measured, Work, float, float]], work: Work, size: tuple[int, int, int]
) -> float | None:
    """Return the seconds of some forward passes of a clip of a size, from rows, their work, its seconds and the scale
    of their error. At a measured size another number of steps is as many tokens as it has more."""
    there = [spent / of_row.tokens for row, of_row, spent, _ in measured if row.size == size]
    if there:
        return statistics.median(there) * work.tokens
    points = [Point(of_row.terms, spent / of_row.passes, of / of_row.passes) for _, of_row, spent, of in measured]
    per_pass = fitted(points, work.terms)
    return None if per_pass is None else per_pass * work.passes


def fitted(points: Sequence[Point], at: Sequence[float]) -> float | None:
    """Return the value at some terms: the median of those that were measured there, else of `sum_at`; None where a term
    behind the first is beyond the measured ones. Of fewer different points than terms, as many of the first count."""
    there = [point.value for point in points if tuple(point.terms) == tuple(at)]
    if there:
        return statistics.median(there)
    measured = sorted({tuple(point.terms) for point in points})
    around = [(min(each), max(each)) for each in zip(*measured, strict=True)]
    if not measured or not all(least <= one <= most for one, (least, most) in zip(at[1:], around[1:], strict=True)):
        return None
    return sum_at(points, at[: len(measured)])


def sum_at(points: Sequence[Point], at: Sequence[float]) -> float:
    """Return the sum of as many of the first terms as `at` has, none of them negative, with the least squares of errors
    in units of their scales."""
    terms = numpy.array([point.terms[: len(at)] for point in points])
    # In units of the largest, so that they are alike.
    units = numpy.maximum(terms.max(axis=0), 1e-9)
    scales = [point.value if point.scale is None else point.scale for point in points]
    weights = 1 / numpy.maximum(scales, 1e-9)
    design, wanted = terms / units * weights[:, None], numpy.array([point.value for point in points]) * weights
    best, found = float(numpy.square(wanted).sum()), numpy.zeros(len(at))
    # Among all choices of terms, of which there are seven.
    for count in range(1, len(at) + 1):
        for chosen in itertools.combinations(range(len(at)), count):
            solved, *_ = numpy.linalg.lstsq(design[:, chosen], wanted, rcond=None)
            error = float(numpy.square(design[:, chosen] @ solved - wanted).sum())
            if (solved >= 0).all() and error < best:
                best, found = error, numpy.zeros(len(at))
                found[list(chosen)] = solved
    return float(numpy.array(at) / units @ found)


def _first_extra(rows: Sequence[Measured], stage: str, pixels: int) -> float:
    """Return the seconds that a stage of the first generation takes more: imports, allocations, compiling. It is
    measured once per size and hidden by the noise of a single run, so that all sizes count: a constant and a linear
    term in pixels."""
    points = [
        Point(powers(row.num_pixels), row.cold[stage] - row.warm[stage], row.cold[stage])
        for row in rows
        if stage in row.cold and stage in row.warm
    ]
    num_sizes = len({point.terms for point in points})
    return sum_at(points, powers(pixels)[: min(num_sizes, 2)]) if points else 0.0


def seconds_text(seconds: float) -> str:
    """`0.093 s`, `12.4 s`, `3.2 min`, `1.5 h`."""
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 120 * 60 else f"{seconds / 3600:.1f} h"


def _per_step(row: Measured) -> float | None:
    seconds = row.warm.get(DENOISE)
    return None if seconds is None else seconds / row.num_steps if row.step is None else row.step


def _basis(rows: Sequence[Measured]) -> str:
    """Return the measured sizes in words."""
    sizes = list(dict.fromkeys(row.size_text for row in sorted(rows, key=lambda row: row.num_pixels)))
    return f"{len(sizes)} measured size{'s' * (len(sizes) > 1)}: {', '.join(sizes)}" if sizes else ""


def _advice(model_path: str, size: tuple[int, int, int], options: Sequence[str]) -> str:
    frames, height, width = size
    clip = f" --height {height} --width {width} --num-frames {frames}" if all(size) else ""
    same = "".join(f" --set {shlex.quote(each)}" for each in options)
    return (
        f"diffusion-runtime bench generate {shlex.quote(model_path)}{clip}{same} --no-diffusers, with the same "
        "attention and device; after two or more sizes, those between them are known too"
    )
