"""GenerationStream: the frames of a video while it is made, chunk after chunk, and prompts that change on the way."""

from __future__ import annotations

import dataclasses
import functools
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
from diffusion_runtime.chunk_decoding import DecodedChunk, DecodingThread
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


# Chunks that are handed out before the one behind them is denoised: the first frames are there as early as can be, and
# whatever a decoder compiles or captures when it first runs is done.
_CHUNKS_IN_LINE = 2


@dataclass(frozen=True, eq=False)
class _BegunChunk:
    """A chunk that is denoised. decoded: waits for its frames, or makes them."""

    first_frame: int
    prompt: str
    decoded: Callable[[], DecodedChunk]


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
    decodes_beside: whether a chunk is decoded while the next one is denoised, from the third one on. A prompt is that
    of the first chunk that has not been begun then, one later than otherwise; frames are the same.
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
        decodes_beside: bool,
    ) -> None:
        """plan: how the video is cut; temporal_factor: frames of a latent frame. chunks: made from the request's
        prompt, whose encoding took text_seconds and left notes. encode: of another prompt. guard: around every
        computation, on any thread. resources: what is closed with the stream. decodes_beside: as the attribute."""
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
        self.decodes_beside = decodes_beside
        self._thread: DecodingThread | None = None
        if decodes_beside:
            self._thread = DecodingThread(self._frames_of, device, guard)
            # Before the clip of the decoder ends, which the thread may be in.
            resources.callback(self._thread.close)
        self._temporal_factor = temporal_factor
        self._num_chunks = 0
        # Frames of the chunks that are denoised, handed out or not.
        self._num_begun = 0
        self._ahead: _BegunChunk | None = None
        self._failed_ahead: Exception | None = None
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
        """Another prompt from the next chunk on that has not been begun. Raises RequestError for one without words."""
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
        if self._failed_ahead is not None:
            raise self._failed_ahead
        begun = self._begin_chunk() if self._ahead is None else self._ahead
        self._ahead = None
        if self._thread is not None and self._num_chunks >= _CHUNKS_IN_LINE:
            self._begin_ahead()
        decoded = begun.decoded()
        self._timings["decode"] += decoded.seconds
        seconds = time.perf_counter() - started
        self.rate.add(len(decoded.frames), seconds, is_first=self.num_frames == 0)
        made = StreamedFrames(decoded.frames, begun.first_frame, begun.prompt, seconds)
        self.num_frames += len(decoded.frames)
        self._num_chunks += 1
        if self._kept is not None:
            self._kept.append(decoded.frames)
        return made

    def _begin_ahead(self) -> None:
        """Denoise the next chunk, where there is one. What fails is the failure of that chunk and not of this one."""
        try:
            self._ahead = self._begin_chunk()
        except StopIteration:
            return
        except Exception as error:
            self._failed_ahead = error

    def _begin_chunk(self) -> _BegunChunk:
        """Denoise the next chunk and, on the thread, begin to decode it. Raises StopIteration behind the last one."""
        self._switch_prompt()
        started, first_frame = self._clock(), self._num_begun
        clean = next(self._chunks)
        self._clock("denoise", started)
        self._num_begun = 1 + self._temporal_factor * (clean.chunk.frames.stop - 1)
        if self._thread is not None:
            return _BegunChunk(first_frame, self._prompt, self._thread.start(clean.latents, first_frame).result)
        return _BegunChunk(first_frame, self._prompt, functools.partial(self._decoded_here, clean.latents, first_frame))

    def _decoded_here(self, latents: torch.Tensor, first_frame: int) -> DecodedChunk:
        started = self._clock()
        frames = self._frames_of(latents, first_frame)
        return DecodedChunk(frames, self._clock() - started)

    def _frames_of(self, latents: torch.Tensor, first_frame: int) -> numpy.ndarray:
        frames: numpy.ndarray = torch.cat(
            [to_pixels(part[0], first_frame) for part in self._decode_next(latents)]
        ).numpy()
        return frames

    def _switch_prompt(self) -> None:
        """Before a chunk: the prompt that is due; of several, the last one that was typed."""
        due = []
        while self._scheduled and self._scheduled[0][0] <= self._num_begun:
            due.append(self._scheduled.popleft()[1])
        while self._typed:
            due.append(self._typed.popleft())
        if not due or due[-1] == self._prompt:
            return
        started, self._prompt = self._clock(), due[-1]
        encoded = self._encode(self._prompt)
        self._notes += [note for note in encoded.notes[0] if note not in self._notes]
        self._clock("text", started)
        if self._num_begun == 0:
            # Nothing has been seen of the first one.
            self.request = dataclasses.replace(self.request, prompt=self._prompt)
        else:
            self._switches.append((self._num_begun, self._prompt))
        self._chunks.switch_text(encoded.conditions, self.request.switch_mode)

    def _clock(self, stage: str | None = None, since: float = 0.0) -> float:
        """The time, once the device is done; the seconds since another one are added to a stage."""
        if self._thread is not None and self.device.type == "cuda":
            # The other stream has its own time.
            torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type != "cpu":
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
        """Seconds by stage: text, denoise (commits included), decode, and of the load before the first generation. With
        decodes_beside the stages overlap."""
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
