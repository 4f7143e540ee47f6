"""GenerationStream: the frames of a video while it is made, chunk after chunk, and prompts that change on the way."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy
import torch

from diffusion_runtime.attention_report import AttentionRecorder, AttentionReport
from diffusion_runtime.batch_settings import BatchSettings
from diffusion_runtime.chunked_denoiser import ChunkStream
from diffusion_runtime.denoising.chunks import ChunkPlan, frames_needed, window_of
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.frame_decoding import to_pixels
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.memory.machine_memory import peaks
from diffusion_runtime.models.interface import LatentDecoder
from diffusion_runtime.prompt_encoding import EncodedPrompts
from diffusion_runtime.request import GenerationRequest
from diffusion_runtime.request_rules import RequestRules


@dataclass(frozen=True, eq=False)
class StreamedFrames:
    """The frames of one chunk: uint8 RGB [frames, height, width, 3]. first_frame: the place of the first of them in the
    video. prompt: what they were made from. seconds: that they took."""

    frames: numpy.ndarray
    first_frame: int
    prompt: str
    seconds: float


@dataclass
class StreamRate:
    """How quickly a stream gave frames, without the time that its reader took.

    first_frame_seconds: from the beginning to the frames of the first chunk, the prompt's encoding included. seconds,
    num_frames: of all chunks behind it. worst_gap_seconds: the longest that one of them took.
    """

    first_frame_seconds: float = 0.0
    seconds: float = 0.0
    num_frames: int = 0
    worst_gap_seconds: float = 0.0

    def add(self, num_frames: int, seconds: float, *, is_first: bool) -> None:
        """One chunk."""
        if is_first:
            self.first_frame_seconds += seconds
            return
        self.seconds += seconds
        self.num_frames += num_frames
        self.worst_gap_seconds = max(self.worst_gap_seconds, seconds)

    @property
    def frames_per_second(self) -> float | None:
        """Of the chunks behind the first; None while there is none."""
        return self.num_frames / self.seconds if self.num_frames else None

    def to_dict(self) -> dict[str, float]:
        """For a sidecar."""
        rate = self.frames_per_second
        return {
            "first_frame_seconds": round(self.first_frame_seconds, 4),
            **({} if rate is None else {"frames_per_second": round(rate, 3)}),
            "worst_gap_seconds": round(self.worst_gap_seconds, 4),
        }


class GenerationStream(Iterator[StreamedFrames]):
    """The chunks of one video, each made when it is asked for. A context manager; `Pipeline.stream` makes one.

        with pipeline.stream(request) as stream:
            for chunk in stream:
                show(chunk.frames)
                if wants_something_else:
                    stream.prompt("a red circle moving up")

    The pipeline serves nobody else until the stream is closed, which its end does as well. Memory does not grow with
    the video where kv_window bounds the frames in sight.

    request: resolved; its prompt_switches apply by themselves. fps: frames per second. num_frames: made so far;
    num_frames_of_video: of all, None without an end; frames_per_chunk: of all chunks but the first and the last.
    """

    def __init__(
        self,
        request: GenerationRequest,
        chunks: ChunkStream,
        decoder: LatentDecoder,
        *,
        fps: int,
        encode: Callable[[str | None], EncodedPrompts],
        notes: Sequence[str],
        text_seconds: float,
        recorder: AttentionRecorder,
        recipe: Mapping[str, Any],
        load_timings: Mapping[str, float],
        device: torch.device,
        guard: Callable[[], AbstractContextManager[None]],
        resources: ExitStack,
        plan: ChunkPlan,
        temporal_factor: int,
        keeps_frames: bool,
    ) -> None:
        """plan: how the video is cut; temporal_factor: frames of a latent frame. chunks: made from the request's
        prompt, whose encoding took text_seconds and left notes. encode: of another prompt. guard: around every
        computation. resources: what is closed with the stream."""
        self.request = request
        self.fps = fps
        self.device = device
        self.num_frames = 0
        self.num_frames_of_video = None if plan.num_frames is None else request.num_frames
        self.frames_per_chunk = temporal_factor * plan.chunk_frames
        self.rate = StreamRate(first_frame_seconds=text_seconds)
        self._resources = resources
        resources.callback(chunks.close)
        self._chunks = chunks
        self._decoder = decoder
        self._decode_next = resources.enter_context(decoder.clip())
        self._encode = encode
        self._notes = list(notes)
        self._recorder = recorder
        self._recipe = recipe
        self._timings = {**load_timings, "text": text_seconds, "denoise": 0.0, "decode": 0.0}
        self._guard = guard
        self._prompt = request.prompt
        self._switches: list[tuple[int, str]] = []
        self._scheduled = deque((int(at), prompt) for at, prompt in request.prompt_switches or ())
        self._typed: deque[str] = deque()
        self._kept: list[numpy.ndarray] | None = [] if keeps_frames else None
        self._is_closed = False

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # An abandoned stream must not keep its pipeline busy.
        if not getattr(self, "_is_closed", True):
            self.close()

    def prompt(self, text: str) -> None:
        """Another prompt from the next chunk on. Raises RequestError for one without words."""
        dataclasses.replace(self.request, prompt=text)
        self._typed.append(text)

    def __next__(self) -> StreamedFrames:
        """The next chunk. Raises what `Pipeline.generate` raises; the stream is closed then."""
        if self._is_closed:
            raise StopIteration
        try:
            with self._guard():
                return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> StreamedFrames:
        started = self._clock()
        self._switch_prompt()
        clean = next(self._chunks)
        denoised = self._clock("denoise", started)
        parts = [to_pixels(part[0], self.num_frames) for part in self._decode_next(clean.latents)]
        frames = torch.cat(parts).numpy()
        seconds = self._clock("decode", denoised) - started
        self.rate.add(len(frames), seconds, is_first=self.num_frames == 0)
        made = StreamedFrames(frames, self.num_frames, self._prompt, seconds)
        self.num_frames += len(frames)
        if self._kept is not None:
            self._kept.append(frames)
        return made

    def _switch_prompt(self) -> None:
        """Before a chunk: the prompt that is due; of several, the last one that was typed."""
        due = []
        while self._scheduled and self._scheduled[0][0] <= self.num_frames:
            due.append(self._scheduled.popleft()[1])
        while self._typed:
            due.append(self._typed.popleft())
        if not due or due[-1] == self._prompt:
            return
        started, self._prompt = self._clock(), due[-1]
        encoded = self._encode(self._prompt)
        self._notes += [note for note in encoded.notes[0] if note not in self._notes]
        self._clock("text", started)
        if self.num_frames == 0:
            # Nothing has been seen of the first one.
            self.request = dataclasses.replace(self.request, prompt=self._prompt)
        else:
            self._switches.append((self.num_frames, self._prompt))
        self._chunks.switch_text(encoded.conditions, self.request.switch_mode)

    def _clock(self, stage: str | None = None, since: float = 0.0) -> float:
        """The time, once the device is done; the seconds since another one are added to a stage."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        if stage is not None:
            self._timings[stage] += now - since
        return now

    def close(self) -> None:
        """No chunk follows: the pipeline is free again. What was made stays known."""
        if self._is_closed:
            return
        self._is_closed = True
        # Whatever happens to the report, the pipeline is free again.
        with self._resources:
            self._chunks.report()
            self._recorder.record_library("vae", self._decoder.library, self._decoder.implementation)

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values that are kept on this process."""
        return self._chunks.num_bytes

    @property
    def recipe(self) -> dict[str, Any]:
        """What repeats the frames made so far: the request with their number, and every prompt with its frame."""
        # Without a prompt whose first chunk was never finished.
        shown = tuple(switch for switch in self._switches if switch[0] < self.num_frames)
        request = dataclasses.replace(self.request, num_frames=max(1, self.num_frames), prompt_switches=shown or None)
        return {**self._recipe, "request": request.to_dict(), "notes": list(self._notes)}

    @property
    def attention_report(self) -> AttentionReport:
        """Of the chunks so far; of the cache and the decoder once the stream is closed."""
        return self._recorder.report()

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by stage: text, denoise (commits included), decode, and of the load before the first generation."""
        return dict(self._timings)

    def media(self) -> GeneratedMedia:
        """All frames made so far. Raises ConfigError without keeps_frames, RequestError before the first chunk."""
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


def check_streamable(rules: RequestRules, settings: BatchSettings, *, endless: bool) -> None:
    """Raises RequestError for a model that makes clips at once, and for a video without an end that sees all of its
    frames, or whose chunks have no room in the window."""
    if not rules.is_causal:
        raise RequestError(
            "stream: this model makes a clip at once, and its first frame is known when its last one is; leave the "
            "stream out, or take a causal model, such as --model-path shapes-causal (docs/streaming.md)"
        )
    if not endless:
        return
    window, chunks = window_of(settings.shared), dataclasses.replace(settings.chunks, num_frames=None)
    needed = frames_needed(settings.shared, chunks, settings.rules.history)
    if window.span is None:
        raise RequestError(
            "stream: a video without an end cannot see all of its frames; give --kv-window, such as "
            f"--kv-window {max(needed, 4 * settings.chunks.chunk_frames)}, or a number of frames"
        )
    # The chunks of a short clip may be shorter than those of a video without an end.
    if window.span < needed:
        raise RequestError(
            f"stream: a video without an end has chunks of {chunks.largest} latent frames, which with a sink of "
            f"{window.sink} need --kv-window {needed} or more, got {window.span}"
        )
