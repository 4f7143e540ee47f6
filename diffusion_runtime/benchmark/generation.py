"""Benchmarks whole generations by stage: cold, the first in the process, and warm; next to diffusers' own."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.benchmark.generation_result import STAGES, GenerationBenchmark, GenerationRow
from diffusion_runtime.benchmark.random_pipeline import random_pipeline
from diffusion_runtime.benchmark.sample_images import sample_images
from diffusion_runtime.benchmark.step_model import is_published
from diffusion_runtime.config import RuntimeConfig, benchmark_options
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.errors import DiffusionRuntimeError, UsageError
from diffusion_runtime.explanation.stage_times import StageTimes, is_offloaded, measured_of
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.loading import load_pipeline
from diffusion_runtime.media.ffmpeg import INSTALL, has_ffmpeg
from diffusion_runtime.media.file_writer import FileWriter
from diffusion_runtime.memory.device_memory import release_device_memory
from diffusion_runtime.request.generation_request import INPUT_FIELDS, GenerationRequest
from diffusion_runtime.startup.importing import raised_line

# Called with what is under way.
OnProgress = Callable[[str], None]

# Every embedded model knows these words.
PROMPT = "moving left"
_RANDOM = (
    "weights and text conditions are random, of the published sizes and length: pictures are noise, and the text "
    "encoder is left out"
)
# Of RuntimeConfig: how ours is computed.
_SETTINGS = ("lora", "attention_override", *benchmark_options())
_NO_FFMPEG = f"write is of npy, not of mp4: there is no ffmpeg here ({INSTALL})"
_GENERATED = "{}: generated, of the size of what is made; reading and encoding it is in denoise"


@dataclass(frozen=True)
class GenerationChoice:
    """Generation to be timed. config: of the model, as it is loaded. values: of the request, by field; preset: of the
    model's. num_warm: generations after the first. changes: see `random_pipeline`."""

    config: RuntimeConfig
    values: Mapping[str, Any]
    preset: str | None = None
    num_warm: int = 3
    with_diffusers: bool = True
    changes: Mapping[str, Mapping[str, object]] | None = None


def benchmark_generation(choice: GenerationChoice, *, on_progress: OnProgress = lambda _: None) -> GenerationBenchmark:
    """Time the generation of one request, ours and diffusers'. An exception of a generation becomes its row; without
    weights there is no row of diffusers.

    Raises what loading ours and resolving the request raise.
    """
    with tempfile.TemporaryDirectory(prefix="diffusion_runtime_bench_") as images:
        return _benchmark(choice, Path(images), on_progress)


def _benchmark(choice: GenerationChoice, folder: Path, on_progress: OnProgress) -> GenerationBenchmark:
    """folder: where images are written."""
    name = choice.config.model_path
    is_random = is_published(name)
    begin = time.perf_counter()
    pipeline: GenerationPipeline
    if is_random:
        pipeline = random_pipeline(name, choice.config, on_progress, choice.changes)
    else:
        # Every run encodes its text, as diffusers' does.
        pipeline = load_pipeline(dataclasses.replace(choice.config, encoding_cache=False), on_stage=on_progress)
    load_s = time.perf_counter() - begin
    images = sample_images(pipeline.rules, choice.values, choice.preset, folder)
    values = {**choice.values, **images}
    request = pipeline.resolve(GenerationRequest(PROMPT, **values), choice.preset)
    device, dtype, runtime = pipeline.device, pipeline.dtype, pipeline.recipe["runtime"]
    rows = [_row("ours", pipeline, request, choice.num_warm, on_progress, is_random=is_random, load_s=load_s)]
    kept = _keep(pipeline, request, rows[0], name if choice.changes is None else "")
    pipeline.close()
    release_device_memory(device)
    if choice.with_diffusers and not is_random:
        rows.append(_theirs(choice, request, dtype, on_progress))
    hardware = detect_hardware(str(device))
    return GenerationBenchmark(
        model=f"{name}, {describe_request(request)}",
        device=f"{hardware.device_name}, {hardware.describe()}",
        versions={"torch": torch.__version__, **hardware.packages},
        dtype=str(dtype).removeprefix("torch."),
        # Not the paths of images that are gone.
        request={**request.to_dict(), **dict.fromkeys(images)},
        rows=tuple(rows),
        settings={name: runtime[name] for name in _SETTINGS},
        remarks=tuple(_remarks(request, images, is_random=is_random)),
        file_format=_file_format(request),
        kept_in=kept,
    )


def _keep(pipeline: GenerationPipeline, request: GenerationRequest, row: GenerationRow, name: str) -> str | None:
    """Keep what was measured for `--dry-run` and `explain`; return where, None where nothing is kept. name: of the
    model, empty for one of other sizes than the model of that name."""
    if not row.warm:
        return None
    times = StageTimes(pipeline.recipe, name)
    measured = measured_of(
        pipeline.recipe,
        pipeline.rules,
        request,
        row.runs[0],
        row.warm,
        row.step_s,
        _file_format(request),
        is_offloaded=is_offloaded(pipeline),
    )
    return str(times.path) if times.keep(measured) else None


def _file_format(request: GenerationRequest) -> str:
    """Return the format that `generate` writes without --format; without ffmpeg, the frames of a video alone."""
    if request.num_frames == 1:
        return "png"
    return "mp4" if has_ffmpeg() else "npy"


def _remarks(request: GenerationRequest, images: Collection[str], *, is_random: bool) -> Iterator[str]:
    """images: the request fields of those that were generated."""
    if is_random:
        yield _RANDOM
    if images:
        yield _GENERATED.format(", ".join(images))
    if _file_format(request) == "npy":
        yield _NO_FFMPEG


def describe_request(request: GenerationRequest) -> str:
    """`29 frames of 256 x 256, 12 steps`."""
    frames = "1 frame" if request.num_frames == 1 else f"{request.num_frames} frames"
    steps = "1 step" if request.num_inference_steps == 1 else f"{request.num_inference_steps} steps"
    return f"{frames} of {request.width} x {request.height}, {steps}"


def _theirs(
    choice: GenerationChoice, request: GenerationRequest, dtype: torch.dtype, on_progress: OnProgress
) -> GenerationRow:
    """diffusers' own pipeline on the same folder, in the same dtype."""
    on_progress("loading diffusers' pipeline")
    config = choice.config
    own = RuntimeConfig(
        model_path=config.model_path,
        backend="diffusers",
        device=config.device,
        dtype=str(dtype).removeprefix("torch."),
    )
    begin = time.perf_counter()
    try:
        pipeline = load_pipeline(own)
        # What only ours knows is none of its parameters.
        theirs = pipeline.resolve(GenerationRequest(PROMPT, **_of_theirs(request)))
    except DiffusionRuntimeError as error:
        return GenerationRow("diffusers", "left out", raised_line(error))
    load_s = time.perf_counter() - begin
    row = _row("diffusers", pipeline, theirs, choice.num_warm, on_progress, load_s=load_s)
    pipeline.close()
    release_device_memory(pipeline.device)
    return row


def _of_theirs(request: GenerationRequest) -> dict[str, Any]:
    names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "fps", *INPUT_FIELDS)
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _row(
    name: str,
    pipeline: GenerationPipeline,
    request: GenerationRequest,
    num_warm: int,
    on_progress: OnProgress,
    *,
    load_s: float,
    is_random: bool = False,
) -> GenerationRow:
    row = GenerationRow(name, "measured", load_s=load_s)
    runs: list[dict[str, float]] = []
    steps: list[float | None] = []
    ran = ""
    try:
        for number in range(1 + num_warm):
            on_progress(f"{name}, {'cold' if number == 0 else f'warm, {number} of {num_warm}'}")
            seconds, step_s, ran = _seconds(pipeline, request)
            runs.append(seconds)
            steps.append(step_s)
    except UsageError:
        raise
    except Exception as error:  # any exception of a kernel, a compiler or a package
        return replace(row, state="failed", reason=raised_line(error))
    if is_random:
        for run in runs:
            del run["text"]
    return replace(row, runs=tuple(runs), steps=tuple(steps), ran=tuple(ran.splitlines()))


class _StepTimes:
    """The seconds between reports of progress within denoising. The first step of a pass over the steps also makes what
    all of them share, and is not among them; a video in chunks or segments has several passes."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._later: list[float] = []
        self._before = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.stage != "denoise":
            return
        if progress.step > 0:
            self._num_steps += 1
        if progress.step > 1:
            self._later.append(progress.seconds - self._before)
        self._before = progress.seconds

    def per_step(self, num_steps: int) -> float | None:
        """Return the mean seconds of one of `num_steps` steps of a request; None where there is no later step."""
        return statistics.mean(self._later) * self._num_steps / num_steps if self._later else None


def _seconds(pipeline: GenerationPipeline, request: GenerationRequest) -> tuple[dict[str, float], float | None, str]:
    """Return the seconds by stage of one generation as the command runs it, those of a step, and its attention report:
    encoding the file begins while frames are decoded."""
    steps = _StepTimes()
    with tempfile.TemporaryDirectory(prefix="diffusion_runtime_bench_") as folder:
        path = Path(folder) / f"made.{_file_format(request)}"
        with FileWriter(path) as writer:
            media = pipeline(request, on_progress=steps, open_sink=writer.open)
            begin = time.perf_counter()
            media.save(path, writer=writer)
            timings = {**media.timings, "write": time.perf_counter() - begin}
    seconds = {stage: timings[stage] for stage in STAGES if stage in timings}
    return seconds, steps.per_step(request.num_inference_steps or 1), str(media.attention_report)
