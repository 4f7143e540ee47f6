"""SegmentStream: the frames of a video that is made in segments, while it is made."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

import numpy
import torch

from diffusion_runtime.core.progress import StageClock
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.generation.batch_run import BatchRun
from diffusion_runtime.generation.frame_decoding import source_sound
from diffusion_runtime.generation.segmented_clip import SegmentedClip
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.memory.machine_memory import peaks
from diffusion_runtime.report.attention_report import AttentionReport
from diffusion_runtime.rules.batch_settings import prompt_at
from diffusion_runtime.streaming.generation_stream import GenerationStream
from diffusion_runtime.streaming.stream_rate import StreamedFrames, StreamRate

# The most that the unexpected end of a file loses, where a decoder gives frames earlier than segments.
_MOST_FRAMES_OF_FRAGMENT = 24


class SegmentStream(Iterator[StreamedFrames]):
    """The frames of one video, each segment made when its first frames are asked for; those of `generate`, to the bit.
    A context manager; `Pipeline.stream` makes one, and it is read as a GenerationStream is.

    fps: frames per second. frames_per_chunk: the most that are handed out without the next ones, about. rate: of what
    the decoder gives.
    """

    decodes_beside = False
    # Nothing is kept of earlier segments but their last frames.
    cache_bytes = 0

    def __init__(
        self,
        run: BatchRun,
        decoder: LatentDecoder,
        recipe: Mapping[str, Any],
        resources: ExitStack,
        *,
        keeps_frames: bool = False,
        load_timings: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """run: of the one request, which check_streamable has passed. recipe: of its generation, without notes.
        resources: closed with the stream."""
        plan = run.settings.segments
        # Notes where a sound is left out since the rates differ.
        source_sound(run.settings, run.recorder)
        self.fps = run.settings.frame_rate
        self.device = run.device
        self.num_frames_of_video = plan.num_frames
        self.frames_per_chunk = min(plan.length - plan.overlap, _MOST_FRAMES_OF_FRAGMENT)
        self.num_frames = 0
        (self.request,) = run.batch
        self._run = run
        self._resources = resources
        self._kept: list[numpy.ndarray] | None = [] if keeps_frames else None
        self._clock = StageClock(run.device, None)
        self._timings = dict(load_timings)
        self._is_closed = False
        began = time.perf_counter()
        with run.guarded():
            prompts = run.read_prompts(self._clock)
        self.rate = StreamRate(first_frame_seconds=time.perf_counter() - began)
        self._recipe = {**recipe, "request": self.request.recorded(), "notes": list(prompts.notes[0])}
        self._clip = SegmentedClip(run, prompts, decoder, self._clock, self._recipe)
        self._chunks = self._clip.stream().chunks

    def __enter__(self) -> SegmentStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # An abandoned stream must not keep its pipeline busy.
        if not getattr(self, "_is_closed", True):
            self.close()

    def __next__(self) -> StreamedFrames:
        if self._is_closed:
            raise StopIteration
        began = time.perf_counter()
        try:
            with self._run.guarded():
                pixels: torch.Tensor | None = next(self._chunks, None)
        except BaseException:
            self.close()
            raise
        if pixels is None:
            self._timings |= {**self._clip.timings, **self._run.participants.finish(self._run.recorder)}
            self.close()
            raise StopIteration
        frames, first, seconds = pixels[0].numpy(), self.num_frames, time.perf_counter() - began
        self.num_frames += len(frames)
        self.rate.add(len(frames), seconds, is_first=first == 0)
        if self._kept is not None:
            self._kept.append(frames)
        return StreamedFrames(frames, first, prompt_at(self.request, first), seconds)

    def prompt(self, text: str) -> None:
        """Raises RequestError: the prompts of segments are those of the request."""
        del text
        raise RequestError("stream: a video in segments takes its prompts before it begins: --at 5s 'a blue star'")

    def fork(self, prompt: str | None = None, *, seed: int | None = None) -> SegmentStream:
        """Raises RequestError: another one goes on from saved latents."""
        del prompt, seed
        raise RequestError(
            "fork: a video in segments is not forked; --save-latents and `finish --segment-seeds` make some of its "
            "segments anew"
        )

    @property
    def recipe(self) -> dict[str, Any]:
        """Recipe that repeats the frames made so far: the request with their number; that of the whole video where
        segments are blended, whose places follow from the end, or the first one is not done: fewer frames than a
        segment's would be a clip of that length, of other noise."""
        plan, seeds = self._run.settings.segments, self.request.segment_seeds
        is_cut = plan.length <= self.num_frames < plan.num_frames and not plan.is_blended
        if not is_cut or (seeds is not None and self.num_frames == plan.length):
            return dict(self._recipe)
        count = len(dataclasses.replace(plan, num_frames=self.num_frames))
        kept = None if seeds is None else seeds[:count]
        switches = tuple(each for each in self.request.prompt_switches or () if int(each[0]) < self.num_frames)
        request = dataclasses.replace(
            self.request, num_frames=self.num_frames, segment_seeds=kept, prompt_switches=switches or None
        )
        return {**self._recipe, "request": request.recorded()}

    @property
    def attention_report(self) -> AttentionReport:
        """Attention report of the segments so far."""
        return self._run.recorder.report()

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by stage, and of the load before the first generation."""
        return {**self._timings, **self._clock.timings(0)}

    def media(self) -> GeneratedMedia:
        """Return all frames so far. Raises ConfigError without keeps_frames, RequestError before the first of them."""
        if self._kept is None:
            raise ConfigError("media: a stream does not keep its frames; use stream(request, keeps_frames=True)")
        if not self._kept:
            raise RequestError("media: no frames have been made yet")
        return GeneratedMedia(
            frames=numpy.concatenate(self._kept),
            fps=self.fps,
            recipe=self.recipe,
            attention_report=self.attention_report,
            timings=self.timings,
            peak_memory=peaks(self.device),
        )

    def close(self) -> None:
        """End the stream; what was made stays. The pipeline serves other callers from here on."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._resources:
            chunks = getattr(self, "_chunks", None)
            if isinstance(chunks, Iterator) and hasattr(chunks, "close"):
                chunks.close()
            if self.num_frames < self.num_frames_of_video:
                self._run.participants.abandon()


AnyStream: TypeAlias = GenerationStream | SegmentStream
