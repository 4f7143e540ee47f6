"""Stage times: seconds of each stage of generations, as `bench generate` measured them on this machine, kept on disk
for later plans.

One small file per machine, model, device and dtype. Only benchmarks write it: a generation beside other work would make
every later plan wrong. A benchmark of what was measured before takes its place; of two that end at the same moment one
is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffusion_runtime.config import runtime_options
from diffusion_runtime.core.cache_folder import cache_root, complete_file
from diffusion_runtime.core.software import made_with
from diffusion_runtime.denoising.chunks import passes_of
from diffusion_runtime.generation.interface import GenerationPipeline, GenerationRules
from diffusion_runtime.models.published import published_model_of
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS, GenerationRequest, image_paths
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.untrusted.json_text import parse_json, read_json_file

SCHEMA = "diffusion_runtime.stage_times/2"
TEXT, DENOISE, DECODE, WRITE = STAGES = ("text", "denoise", "decode", "write")
# What an amount of work is measured in: see Work.
_NUM_KINDS = 3
# The latest of a file; more sizes and settings than anybody measures of one model.
_MOST = 100
# Request fields that do not change how long a step takes, or that the size of a clip and its steps stand for. Any other
# that is set must be equal for a figure to hold.
_ELSEWHERE = frozenset(
    (
        "prompt", "negative_prompt", "seed", "height", "width", "num_frames", "seconds", "min_seconds", "max_seconds",
        "fps", "num_inference_steps", "guidance_scale", "true_cfg_scale", "guidance_rescale", "flow_shift", "sigmas",
        "sigmas_before_shift", "shift_terminal",
    )
)  # fmt: skip
# Options of RuntimeConfig that change how long a stage takes; of attention the decisions count, which the recipe has.
_OPTIONS = (
    "quantization", "quantization_ignored_layers", "compile", "cuda_graphs", "vae_decode", "vae_tiling", "vae_decoder",
    "upsampler_path", "controlnet_path", "interpolation_path",
)  # fmt: skip
_DECISION_KEYS = ("role", "when", "layers", "backend", "options")

_logger = logging.getLogger("diffusion_runtime.explanation")


class Work(NamedTuple):
    """The work of some forward passes of one sample and one guidance branch: how many, the tokens of all, and the pairs
    of a token and a key that it attends to. Pixels stand for tokens where a pipeline of diffusers does not say them."""

    passes: int
    tokens: int
    pairs: int

    @property
    def terms(self) -> tuple[float, float, float]:
        """Return the terms of a mean pass's time, a sum with unknown factors: itself, its tokens and its pairs."""
        return 1.0, self.tokens / self.passes, self.pairs / self.passes


@dataclass(frozen=True)
class Measured:
    """One benchmark. how: digest of all that must be equal for its figures to hold, besides size, steps and format.
    step_work: of all denoising steps; once_work: of what is done once, beside the steps, such as commits. num_pixels:
    of all frames. cold: seconds by stage of the first generation of a process; warm: the medians of those after it.
    step: seconds of a step of those, without what their first step does once; None where one step was all."""

    how: str
    size: tuple[int, int, int]
    step_work: Work
    once_work: Work
    num_steps: int
    file_format: str
    cold: Mapping[str, float]
    warm: Mapping[str, float]
    step: float | None

    @property
    def num_pixels(self) -> int:
        """Pixels of all frames. size: (frames, height, width)."""
        return math.prod(self.size)

    @property
    def size_text(self) -> str:
        """`256 x 256`, `29 frames of 256 x 256`."""
        frames, height, width = self.size
        return f"{width} x {height}" if frames == 1 else f"{frames} frames of {width} x {height}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """Raises KeyError, TypeError and ValueError for anything else than `asdict` of one."""
        step = values["step"]
        frames, height, width = (int(each) for each in values["size"])
        cold, warm = ({str(name): _seconds(each) for name, each in values[when].items()} for when in ("cold", "warm"))
        return cls(
            how=str(values["how"]),
            size=(frames, height, width),
            step_work=_work(values["step_work"]),
            once_work=_work(values["once_work"]),
            num_steps=int(values["num_steps"]),
            file_format=str(values["file_format"]),
            cold=cold,
            warm=warm,
            step=None if step is None else _seconds(step),
        )


class StageTimes:
    """The file of one machine, model, device and dtype."""

    def __init__(self, recipe: Mapping[str, Any], model_path: str) -> None:
        """recipe: of PipelineDescription.to_dict. model_path: as it was given: a published name stands for the model
        whether its weights are real or random, and any other for the json of its folder."""
        published = published_model_of(model_path)
        model = recipe["model"]
        facts = {
            "version": recipe["version"],
            "made_with": recipe.get("made_with") or made_with(model["device"]),
            "model": model["config_sha256"] if published is None else published.name,
            "device": model["device"],
            "dtype": model["dtype"],
        }
        # As it comes back from the file.
        self._facts: dict[str, Any] = parse_json(json.dumps(facts))
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16]
        self.path: Path = cache_root() / "stage_times" / f"{digest}.json"

    def read(self) -> tuple[Measured, ...]:
        """Return what was measured, the latest last; nothing where the file is damaged, which is logged."""
        try:
            # Its errors are ConfigErrors, which are ValueErrors.
            values = read_json_file(self.path) if self.path.exists() else None
            if values is None:
                return ()
            if values["schema"] != SCHEMA or values["facts"] != self._facts:
                raise ValueError(f"expected an object of schema {SCHEMA} about this machine")
            return tuple(Measured.from_dict(each) for each in values["measured"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _logger.warning(
                "the times in %s cannot be read (%s); `bench generate` measures them again", self.path, error
            )
            return ()

    def keep(self, measured: Measured) -> bool:
        """Keep a measurement in the place of an earlier one of the same. Returns False where the folder cannot be
        written, which is logged."""
        key = (measured.how, measured.size, measured.file_format)
        others = [each for each in self.read() if (each.how, each.size, each.file_format) != key]
        rows = [asdict(each) for each in (*others, measured)][-_MOST:]
        values = {"schema": SCHEMA, "facts": self._facts, "measured": rows}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with complete_file(self.path, json.dumps(values, indent=1) + "\n") as complete:
                os.replace(complete, self.path)
        except OSError as error:
            _logger.warning("the times cannot be kept in %s: %s", self.path, error)
            return False
        return True


def how_of(recipe: Mapping[str, Any], rules: GenerationRules, request: GenerationRequest, *, is_offloaded: bool) -> str:
    """Return a digest of all that the time of a stage depends on, besides the size, the steps and the format: the
    options, what attention was decided, how processes share the work, and the fields of the resolved request."""
    rows = [{key: row[key] for key in _DECISION_KEYS} for row in recipe["attention"]]
    fields = {
        name: len(image_paths(request, name)) if name in INPUT_FIELDS else getattr(request, name)
        for name in REQUEST_FIELDS
        if name not in _ELSEWHERE and getattr(request, name) is not None
    }
    values = {
        "options": {name: recipe["runtime"][name] for name in _OPTIONS},
        "attention": rows,
        "parallel": recipe.get("parallel"),
        "is_offloaded": is_offloaded,
        "is_guided": rules.is_guided(request),
        "fields": fields,
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def options_of(recipe: Mapping[str, Any], rules: GenerationRules, request: GenerationRequest) -> list[str]:
    """Return what `how_of` depends on and is not as by default, as `--set` takes it: options, and fields of a resolved
    request that are numbers, texts, files or prompts of later times."""
    options = runtime_options()
    found = [
        f"runtime.{name}={value}"
        for name in _OPTIONS
        if (value := recipe["runtime"][name]) != options[name].default and isinstance(value, str | int | float)
    ]
    for name in REQUEST_FIELDS:
        value = getattr(request, name)
        if name in _ELSEWHERE or value in (None, rules.defaults.get(name), REQUEST_FIELDS[name].off):
            continue
        found += [f"request.{name}={text}" for text in _texts_of(name, value)]
    return found


def _texts_of(name: str, value: object) -> list[str]:
    """Return the value of a request's field as texts that `--set` takes one after the other; none for what it takes
    none of, and for images that a benchmark makes itself."""
    if name in INPUT_FIELDS:
        return [value] if isinstance(value, str) else []
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return [f"{at}f {each}" if isinstance(at, int) else f"{at} {each}" for at, each in value]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return [str(text)] if isinstance(text, str | int | float) else []


def is_offloaded(pipeline: GenerationPipeline) -> bool:
    """Return whether weights of a loaded model wait in the machine's memory."""
    if pipeline.inspectable is None:
        return pipeline.recipe["runtime"]["offload"] in ("model", "layers")
    return pipeline.inspectable.parts.offloading is not None


def size_of(request: GenerationRequest) -> tuple[int, int, int]:
    """Return (frames, height, width) in pixels of a resolved request; 0 for what a pipeline of diffusers decides."""
    return request.num_frames or 0, request.height or 0, request.width or 0


def works_of(rules: GenerationRules, request: GenerationRequest) -> tuple[Work, Work]:
    """Return the work of all denoising steps of a resolved request, and of what is done once. A chunk of a causal
    model's video attends to those before it that are in sight, its commit is a pass of its own, and the first one may
    have a number of steps of its own."""
    num_steps = request.num_inference_steps or 1
    if not isinstance(rules, RequestRules) or request.num_frames is None:
        pixels = max(1, math.prod(size_of(request)))
        return _work_of(num_steps, pixels), _work_of(1, pixels)
    settings = rules.settings(request)
    if not rules.sampling.is_causal:
        size = settings.of_window(settings.of_segment().size)
        num_passes = len(settings.segments) * len(settings.windows or (None,))
        tokens = rules.sampling.geometry.num_tokens(size.height, size.width, size.num_frames)
        return _work_of(num_steps * num_passes, tokens), _work_of(num_passes, tokens)
    chunks, passes = settings.chunking.plan, settings.chunking.cache_passes()
    denoised, once = [0, 0, 0], [1, 0, 0]
    for frames, kind in passes_of(request, chunks, rules.sampling.history):
        plan = passes.plan(frames, kind)
        tokens = plan.num_frames * plan.tokens_per_frame
        total = denoised if kind == "denoise" else once
        for index, amount in enumerate((1, tokens, tokens * plan.num_keys)):
            total[index] += amount
    return Work(*denoised), Work(*once)


def _work_of(num_passes: int, tokens: int) -> Work:
    return Work(num_passes, num_passes * tokens, num_passes * tokens**2)


def measured_of(
    recipe: Mapping[str, Any],
    rules: GenerationRules,
    request: GenerationRequest,
    cold: Mapping[str, float],
    warm: Mapping[str, float],
    step: float | None,
    file_format: str,
    *,
    is_offloaded: bool,
) -> Measured:
    """Return what a benchmark of a resolved request measured. cold, warm, step: as of Measured."""
    return Measured(
        how_of(recipe, rules, request, is_offloaded=is_offloaded),
        size_of(request),
        *works_of(rules, request),
        request.num_inference_steps or 1,
        file_format,
        dict(cold),
        dict(warm),
        step,
    )


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"expected seconds, got {value!r}")
    return float(value)


def _work(values: object) -> Work:
    if not isinstance(values, list) or len(values) != _NUM_KINDS:
        raise ValueError(f"expected passes, tokens and pairs, got {values!r}")
    work = Work(*(int(each) for each in values))
    if work.passes < 1:
        raise ValueError(f"expected one pass or more, got {work.passes}")
    return work
