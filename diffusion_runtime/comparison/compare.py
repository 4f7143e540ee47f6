"""Compare: every setting makes the same clips; models are loaded one after the other, once per RuntimeConfig."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_runtime.comparison.attention_figures import (
    ExpectedDensity,
    attention_seconds,
    counted_density,
    expected_density,
    expected_operations,
)
from diffusion_runtime.comparison.frame_metrics import FrameMetrics
from diffusion_runtime.comparison.latent_distance import LatentComparison, LatentWatcher
from diffusion_runtime.comparison.page import check_encoder, encode_picture
from diffusion_runtime.comparison.prompt_attributes import known_attributes
from diffusion_runtime.comparison.result import STAGES, Clip, Comparison, Kind, Row, steps_at_the_same_time
from diffusion_runtime.comparison.setting import OpenedSetting, Setting, named_error, open_settings
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.errors import DiffusionRuntimeError, shown
from diffusion_runtime.explanation.estimate import estimate_text
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.loading import Prepared, prepare
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.memory.machine_memory import forget_device_peak
from diffusion_runtime.profiling.instruments import watched_latents
from diffusion_runtime.quality.clip_score import ClipScore
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.failures import Failure
from diffusion_runtime.session.reporter import Reporter

# Called with the row's name and a clip of it; returns where it was saved, None for nowhere.
SaveClip = Callable[[str, GenerationRequest, GeneratedMedia], "str | None"]
# Called with a resolved request; raises why its clip could not be saved.
CheckRequest = Callable[[GenerationRequest], object]


@dataclass(frozen=True)
class Choices:
    """threshold: of the latents' relative L2 distance, whose first step over it is named. warm_up: None makes a clip
    twice where there is one alone, so that no time counts what happens at the first one only; where there are several,
    the first one's time does not count. attention_time: whether a further clip of each setting times its attention.
    clip_path: of a CLIP model, for its score.
    pictures: whether encoded clips are kept, for the page. check_request: called with every request of the reference
    before weights are read."""

    threshold: float = 0.1
    warm_up: bool | None = None
    attention_time: bool = True
    clip_path: str | None = None
    pictures: bool = False
    check_request: CheckRequest = lambda _: None


def compare(
    settings: Sequence[Setting],
    reporter: Reporter | None = None,
    choices: Choices | None = None,
    save: SaveClip = lambda *_: None,
) -> Comparison:
    """Compare settings; the first one is the reference. reporter: None for silence.

    Raises what `open_settings` and check_request raise, MissingPackageError for pictures of videos without ffmpeg, and
    ModelLoadError for a folder that holds no CLIP model, before any weight is read, and whatever ends the reference;
    another setting that fails is a row, and the others go on.
    """
    opened, choices = open_settings(settings), choices or Choices()
    for request in opened[0].requests:
        choices.check_request(request)
        if choices.pictures:
            check_encoder(request)
    run = _Run(opened, _Silent() if reporter is None else reporter, choices, save)
    with run:
        return run.compared()


class _Silent:
    """Reporter that prints nothing."""

    def say(self, text: str, /) -> None:
        del text

    def error(self, text: str, trace: str = "", /) -> None:
        del text, trace

    @contextlib.contextmanager
    def progress(self, title: str, /) -> Iterator[_Silent]:
        del title
        yield self

    def update(self, progress: Progress, /) -> None:
        del progress


@dataclass
class _Run:
    settings: Sequence[OpenedSetting]
    reporter: Reporter
    choices: Choices
    save: SaveClip
    metrics: FrameMetrics = field(default_factory=FrameMetrics)
    # The model that is loaded, and the seconds that took.
    loaded: tuple[RuntimeConfig, GenerationPipeline, float] | None = None
    frames: list[Any] = field(default_factory=list)
    # What was made: nothing is made twice.
    made: list[tuple[Sequence[GenerationRequest], Row]] = field(default_factory=list)

    def __post_init__(self) -> None:
        reference = self.settings[0]
        self.latents = LatentComparison(len(reference.requests))
        prompts = [request.prompt for request in reference.requests]
        self.attributes = known_attributes(reference.setting.runtime.model_path, prompts)
        path = self.choices.clip_path
        self.clip_score = None if path is None else ClipScore(path, _device_of(reference))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._close()

    def compared(self) -> Comparison:
        reference, *others = self.settings
        for each in others:
            if each.failure is not None:
                self.reporter.error(f"{each.name}: {each.failure.message}", each.failure.trace)
            elif each.same_as is not None:
                self.reporter.say(f"{each.name} resolves to the same as {each.same_as}, and is not run")
        self._say_how_much()
        rows = {reference.name: self._measured(reference)}
        for each in _by_model(self.settings)[1:]:
            rows[each.name] = self._row(each)
        beside = {each.name: self._fewer_steps(rows[reference.name], rows[each.name]) for each in others}
        ordered = [rows[reference.name]]
        for each in others:
            ordered.append(rows[each.name])
            fewer = beside[each.name]
            if fewer is not None:
                ordered.append(fewer)
        dtype = self.latents.dtype
        return Comparison(
            rows=tuple(ordered),
            threshold=self.choices.threshold,
            device=_device_of(reference),
            version=_version_of(reference),
            unavailable=self.metrics.unavailable,
            latents_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            remarks=tuple(self._remarks(ordered)),
        )

    def _say_how_much(self) -> None:
        """Say how much will be computed, before minutes of work on a CPU."""
        opened = [each for each in self.settings if each.prepared is not None and each.requests]
        if _device_of(self.settings[0]) != "cpu" or not opened:
            return
        num_clips = operations = 0
        for each in opened:
            assert each.prepared is not None
            # A clip that warms up or times attention is made in addition to those that are compared.
            of_each = len(each.requests) + int(self.choices.attention_time) + int(len(each.requests) == 1)
            num_clips += of_each
            operations += of_each * int(expected_operations(each.prepared, each.requests[0]))
        what = f"{len(opened)} settings, {num_clips} clips, and as many with fewer steps where that tells more"
        self.reporter.say(f"{what}: {estimate_text(operations, torch.float32)}" if operations else what)

    def _row(self, opened: OpenedSetting) -> Row:
        """Return the row of a setting that is not the reference; its failure is a row."""
        if opened.failure is not None:
            return _failed(opened.setting, opened.failure)
        if opened.same_as is not None:
            reason = f"resolves to the same as {opened.same_as}"
            return Row(opened.name, "setting", "same", beside=opened.same_as, reason=reason)
        try:
            return self._measured(opened)
        except Exception as error:
            failure = Failure.of(error)
            self.reporter.error(f"{opened.name}: {failure.message}", failure.trace)
            return _failed(opened.setting, failure)

    def _measured(self, opened: OpenedSetting) -> Row:
        is_reference = opened is self.settings[0]
        assert opened.prepared is not None
        kind: Kind = "reference" if is_reference else "setting"
        try:
            blank = Row(opened.name, kind, "measured", runtime=opened.setting.runtime)
            return self._made(blank, opened.requests, opened.prepared)
        except DiffusionRuntimeError as error:
            if is_reference:
                raise named_error(opened.name, error) from error
            raise

    def _fewer_steps(self, reference: Row, row: Row) -> Row | None:
        """Return the reference with as many steps as take the row's time, or None for a row without figures."""
        if row.state != "measured":
            return None
        num_steps = steps_at_the_same_time(reference, row)
        name = f"{reference.name}, {num_steps} steps"
        if num_steps is None:
            reason = f"{row.name} takes as long as all {reference.num_steps} steps of {reference.name}, or longer"
            return Row(f"{reference.name}, fewer steps", "fewer_steps", "not_faster", beside=row.name, reason=reason)
        opened = self.settings[0]
        blank = Row(name, "fewer_steps", "measured", num_steps, row.name, runtime=opened.setting.runtime)
        try:
            # Another one: what was loaded is no longer what was prepared.
            prepared = prepare(opened.setting.runtime)
            requests = [
                prepared.rules.resolve(_with_steps(request, num_steps), opened.setting.preset)
                for request in opened.setting.requests
            ]
            for made, found in self.made:
                if found.runtime == blank.runtime and list(made) == requests:
                    return dataclasses.replace(found, name=name, kind=blank.kind, beside=row.name)
            return self._made(blank, requests, prepared)
        except Exception as error:
            failure = Failure.of(error)
            self.reporter.error(f"{name}: {failure.message}", failure.trace)
            return dataclasses.replace(blank, state="failed", failure=failure, reason=failure.message)

    def _made(self, row: Row, requests: Sequence[GenerationRequest], prepared: Prepared) -> Row:
        """Return the row with its clips."""
        expected = expected_density(prepared, requests[0])
        pipeline, load_seconds = self._load(row, prepared, requests)
        forget_device_peak(pipeline.device)
        warm_up = self.choices.warm_up
        if warm_up if warm_up is not None else len(requests) == 1:
            with self.reporter.progress(f"{row.name}: warm-up") as view:
                pipeline(requests[0], on_progress=view.update)
        clips: list[Clip] = []
        peak: dict[str, int] = {}
        for index, request in enumerate(requests):
            title = f"{row.name} [{index + 1}/{len(requests)}] {request.prompt[:40]}"
            with self.reporter.progress(title) as view, self._watched(pipeline, row, index) as watcher:
                media = pipeline(request, on_progress=view.update)
            peak = {place: max(peak.get(place, 0), size) for place, size in media.peak_memory.items()}
            clips.append(self._clip(row, index, request, media, watcher))
        is_cold = warm_up is None and len(requests) > 1
        seconds, counted = self._attention(row, requests[0], pipeline, expected)
        made = dataclasses.replace(
            row,
            num_steps=requests[0].num_inference_steps,
            request=requests[0],
            clips=tuple(clips),
            num_untimed=1 if is_cold else 0,
            load_seconds=load_seconds,
            density=expected.share if counted is None else counted,
            is_counted=counted is not None,
            attention_seconds=seconds,
            peak_memory=peak,
        )
        self.made.append((requests, made))
        return made

    def _attention(
        self, row: Row, request: GenerationRequest, pipeline: GenerationPipeline, expected: ExpectedDensity
    ) -> tuple[float | None, float | None]:
        """Return the seconds of attention, and a density that depends on content, from clips that are not timed."""
        inspected = pipeline.inspectable
        if inspected is None:
            return None, None
        seconds = counted = None
        if self.choices.attention_time:
            with self.reporter.progress(f"{row.name}: attention time") as view:
                seconds = attention_seconds(inspected, request, view.update)
        if expected.is_up_to_content:
            with self.reporter.progress(f"{row.name}: density") as view:
                counted = counted_density(inspected, request, view.update, expected)
        return seconds, counted

    def _clip(
        self,
        row: Row,
        index: int,
        request: GenerationRequest,
        media: GeneratedMedia,
        watcher: LatentWatcher | None,
    ) -> Clip:
        distance = None if watcher is None else watcher.distance
        if row.kind == "reference":
            self.frames.append(media.frames)
        attributes = self.attributes[index]
        picture, kind = encode_picture(media) if self.choices.pictures else (None, "")
        return Clip(
            prompt=request.prompt,
            seed=request.seed,
            latent_l2=() if distance is None else distance.relative_l2,
            final_latent_l2=None if distance is None else distance.final,
            metrics={} if row.kind == "reference" else self._frame_metrics(media, index),
            seconds={stage: media.timings[stage] for stage in STAGES if stage in media.timings},
            computed_share=_computed_share(media),
            verdict=None if attributes is None else attributes.judge(torch.from_numpy(media.frames)),
            clip_score=None if self.clip_score is None else self.clip_score(media.frames, request.prompt),
            path=self.save(row.name, request, media),
            picture=picture,
            picture_type=kind,
        )

    def _frame_metrics(self, media: GeneratedMedia, index: int) -> dict[str, float | None]:
        reference = self.frames[index]
        if media.frames.shape != reference.shape:
            raise DiffusionRuntimeError(
                f"expected frames {list(reference.shape)}, as the reference made, got {list(media.frames.shape)}"
            )
        return self.metrics.of(media.frames, reference)

    @contextlib.contextmanager
    def _watched(self, pipeline: GenerationPipeline, row: Row, index: int) -> Iterator[LatentWatcher | None]:
        inspected = pipeline.inspectable
        if inspected is None or inspected.rules.sampling.is_causal:
            # diffusers' own pipeline keeps its latents to itself; chunks have steps of their own, and the last latents
            # are those of the last chunk.
            yield None
        elif row.kind == "reference":
            with watched_latents(inspected, self.latents.keep()):
                yield None
        elif self.latents.dtype is None:
            # The reference's were not seen.
            yield None
        else:
            watcher = self.latents.beside(index)
            with watched_latents(inspected, watcher):
                yield watcher

    def _load(
        self, row: Row, prepared: Prepared, requests: Sequence[GenerationRequest]
    ) -> tuple[GenerationPipeline, float]:
        assert row.runtime is not None
        if self.loaded is not None and self.loaded[0] == row.runtime:
            return self.loaded[1:]
        self._close()
        self.reporter.say(f"{row.name}: loading {row.runtime.model_path}")
        started = time.perf_counter()
        pipeline = prepared.load(None, requests)
        seconds = time.perf_counter() - started
        self.loaded = (row.runtime, pipeline, seconds)
        return pipeline, seconds

    def _close(self) -> None:
        if self.loaded is not None:
            _, pipeline, _ = self.loaded
            self.loaded = None
            pipeline.close()

    def _remarks(self, rows: Sequence[Row]) -> Iterator[str]:
        reference = rows[0]
        if self.latents.dtype is None:
            yield "latents: the model makes chunks or does not show them; clips are compared by their frames"
        unknown = [clip.prompt for clip in reference.clips if clip.verdict is None]
        if 0 < len(unknown) < len(reference.clips):
            text = f"{len(unknown)} prompts that name other things than the model's, such as {shown(unknown[0])}"
            yield f"accuracy: without {text}"
        if reference.num_untimed:
            yield "time: median over the clips of a setting, without the first, which warms up"
        elif self.choices.warm_up is False:
            yield "time: without a warm-up; kernels that are compiled at their first use count"
        if reference.attention_seconds is not None:
            yield "attention: seconds of the attention layers in a further clip, which no other figure counts"
        elif self.choices.attention_time:
            yield "attention: diffusers' own pipeline runs the model, whose attention has no time of its own"
        counted = [row.name for row in rows if row.is_counted]
        if counted:
            yield f"density: counted in a further clip, because the content decides it: {', '.join(counted)}"
        if _device_of(self.settings[0]) == "cpu":
            yield "memory: on a CPU the most that the process had so far; settings before a row count"


def _by_model(settings: Sequence[OpenedSetting]) -> list[OpenedSetting]:
    """Return the settings in their order, those of one RuntimeConfig together."""
    models: list[RuntimeConfig] = []
    for each in settings:
        if each.setting.runtime not in models:
            models.append(each.setting.runtime)
    return sorted(settings, key=lambda each: models.index(each.setting.runtime))


def _with_steps(request: GenerationRequest, num_steps: int) -> GenerationRequest:
    """Return the same request with so many steps, at noise levels of its own spacing."""
    levels = {"sigmas": None, "sigmas_before_shift": None}
    return dataclasses.replace(request, num_inference_steps=num_steps, **levels)  # type: ignore[arg-type]


def _failed(setting: Setting, failure: Failure) -> Row:
    return Row(setting.name, "setting", "failed", reason=failure.message, failure=failure, runtime=setting.runtime)


def _device_of(opened: OpenedSetting) -> str:
    assert opened.prepared is not None
    return opened.prepared.description.device


def _version_of(opened: OpenedSetting) -> str:
    assert opened.prepared is not None
    return str(opened.prepared.description.to_dict()["version"])


def _computed_share(media: GeneratedMedia) -> float:
    rows = media.attention_report.steps
    total = sum(row.num_computed + row.num_reused for row in rows)
    return sum(row.num_computed for row in rows) / total if total else 1.0
