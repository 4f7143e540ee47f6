"""Expected time: seconds per stage of a generation, from figures that `bench generate` measured on this machine.

A size that was measured has its own figure. Between measured sizes a curve is fitted: a constant, a linear and, from
three sizes on, a quadratic term, none of them negative, in tokens for denoising and in pixels for decoding and writing.
Nothing is said beyond the measured sizes, or of other settings.
"""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from diffusion_runtime.explanation.stage_times import (
    DECODE,
    DENOISE,
    STAGES,
    TEXT,
    WRITE,
    Measured,
    StageTimes,
    how_of,
    num_tokens_of,
    options_of,
    size_of,
)
from diffusion_runtime.generation.interface import GenerationRules
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.request.generation_request import GenerationRequest

_LINEAR, _QUADRATIC = 2, 3
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
    tokens = num_tokens_of(rules, request)
    pixels = size[0] * size[1] * size[2]

    def at(value_of: Callable[[Measured], float | None], *, in_tokens: bool = False) -> float | None:
        points: list[tuple[float, float]] = []
        for row in rows:
            place = row.num_tokens if in_tokens and tokens is not None else row.num_pixels
            value = value_of(row)
            if place is not None and value is not None:
                points.append((float(place), value))
        return fitted(points, float(tokens if in_tokens and tokens is not None else pixels))

    seconds: dict[str, float | None] = {}
    texts = [value for row in rows if (value := _run(row, is_first).get(TEXT)) is not None]
    seconds[TEXT] = statistics.median(texts) if texts else None
    per_step = at(_per_step, in_tokens=True)
    once = at(lambda row: _once(row, is_first), in_tokens=True)
    seconds[DENOISE] = None if per_step is None or once is None else num_steps * per_step + once
    seconds[DECODE] = at(lambda row: _run(row, is_first).get(DECODE))
    seconds[WRITE] = at(lambda row: _run(row, is_first).get(WRITE) if row.file_format == file_format else None)
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


def fitted(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """Return the value at a size from (size, value) pairs: the median of those at it, else of a curve through those
    around it, with the smallest relative squared error; None where no size on one side of it was measured."""
    by_size: dict[float, list[float]] = {}
    for size, value in points:
        by_size.setdefault(size, []).append(value)
    if at in by_size:
        return statistics.median(by_size[at])
    if not by_size or not min(by_size) < at < max(by_size):
        return None
    sizes = sorted(by_size)
    values = numpy.array([statistics.median(by_size[size]) for size in sizes])
    num_terms = _QUADRATIC if len(sizes) >= _QUADRATIC else _LINEAR
    # In units of the largest size, so that the powers are alike.
    powers = (numpy.array(sizes)[:, None] / sizes[-1]) ** numpy.arange(num_terms)
    weights = 1 / numpy.maximum(values, 1e-9)
    best, found = numpy.inf, numpy.zeros(num_terms)
    # The best terms that are not negative: among all choices of terms, of which there are seven.
    for count in range(1, num_terms + 1):
        for terms in itertools.combinations(range(num_terms), count):
            solved, *_ = numpy.linalg.lstsq(powers[:, terms] * weights[:, None], values * weights, rcond=None)
            error = float(numpy.square((powers[:, terms] @ solved - values) * weights).sum())
            if (solved >= 0).all() and error < best:
                best, found = error, numpy.zeros(num_terms)
                found[list(terms)] = solved
    return float(((at / sizes[-1]) ** numpy.arange(num_terms)) @ found)


def seconds_text(seconds: float) -> str:
    """`0.093 s`, `12.4 s`, `3.2 min`, `1.5 h`."""
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 120 * 60 else f"{seconds / 3600:.1f} h"


def _run(row: Measured, is_first: bool) -> Mapping[str, float]:
    return row.cold if is_first else row.warm


def _per_step(row: Measured) -> float | None:
    seconds = row.warm.get(DENOISE)
    return None if seconds is None else seconds / row.num_steps if row.step is None else row.step


def _once(row: Measured, is_first: bool) -> float | None:
    """Return the seconds of denoising that are none of the steps'."""
    seconds, step = _run(row, is_first).get(DENOISE), _per_step(row)
    return None if seconds is None or step is None else max(0.0, seconds - row.num_steps * step)


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
