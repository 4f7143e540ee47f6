"""GenerationStream: the frames of a video while it is made, chunk after chunk, and prompts that change on the way."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import Any

import numpy
import torch

from diffusion_runtime.decoders.sample_decoder import DecodeNext
from diffusion_runtime.denoising.chunks import frames_needed, window_of
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.generation.chunk_decoding import DecodedChunk
from diffusion_runtime.generation.chunked_denoiser import ChunkStream
from diffusion_runtime.generation.frame_decoding import has_source_sound, to_pixels
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.memory.machine_memory import peaks
from diffusion_runtime.report.attention_report import AttentionRecorder, AttentionReport
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.streaming.stream_rate import StreamedFrames, StreamRate
from diffusion_runtime.streaming.stream_state import BegunChunk, StreamPlace, StreamSource

# Chunks that are handed out before the one behind them is denoised: the first frames are there as early as can be, and
# whatever a decoder compiles or captures when it first runs is done.
_CHUNKS_IN_LINE = 2


class GenerationStream(Iterator[StreamedFrames]):
    """The chunks of one video, each made when it is asked for. A context manager; `Pipeline.stream` makes one::

        with pipeline.stream(request) as stream:
            for chunk in stream:
                show(chunk.frames)
                if wants_something_else:
                    stream.prompt("a red circle moving up")

    The pipeline serves no other caller until the stream and its forks are closed, which their end does as well. Memory
    does not grow with the video where kv_window bounds the frames in sight.

    fps: frames per second. num_frames_of_video: of all, None without an end; frames_per_chunk: of all chunks but the
    first and the last. rate: of the chunks that this stream made, those before a fork left out, as in its timings and
    attention_report. decodes_beside: whether a chunk is decoded while the next one is denoised, from the third one on.
    A prompt is that of the first chunk that has not been begun then, one later than otherwise; frames are the same.
    """

    def __init__(
        self,
        source: StreamSource,
        chunks: ChunkStream,
        recorder: AttentionRecorder,
        place: StreamPlace,
        *,
        text_seconds: float = 0.0,
        load_timings: Mapping[str, float] = MappingProxyType({}),
        decode_next: DecodeNext | None = None,
    ) -> None:
        """chunks: made from the request's prompt, whose encoding took text_seconds. recorder: of what is computed for
        this stream. decode_next: None for a clip that begins."""
        self.fps = source.fps
        self.device = source.device
        self.num_frames_of_video = None if source.plan.num_frames is None else place.request.num_frames
        self.frames_per_chunk = source.temporal_factor * source.plan.chunk_frames
        self.decodes_beside = source.thread is not None
        self.rate = StreamRate(first_frame_seconds=text_seconds)
        self._source = source
        self._chunks = chunks
        self._recorder = recorder
        self._place = place
        self._encode = source.encoder(recorder)
        self._timings = {**load_timings, "text": text_seconds, "denoise": 0.0, "decode": 0.0}
        self._num_own_chunks = 0
        self._decoding: list[Future[DecodedChunk]] = []
        self._failed_ahead: Exception | None = None
        self._closed_bytes: int | None = None
        self._is_closed = False
        self._resources = ExitStack()
        source.generation.join()
        self._resources.callback(source.generation.leave)
        self._resources.callback(chunks.close)
        try:
            self._decode_next = (
                self._resources.enter_context(source.decoder.clip()) if decode_next is None else decode_next
            )
        except BaseException:
            self._is_closed = True
            self._resources.close()
            raise
        # Before the clip of the decoder ends, which the thread may be in.
        self._resources.callback(_end_decoding, self._decoding)

    @property
    def request(self) -> GenerationRequest:
        """Resolved, with the prompt of the first chunk; its prompt_switches apply by themselves."""
        return self._place.request

    @property
    def num_frames(self) -> int:
        """Made so far, before a fork as well."""
        return self._place.num_frames

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
        """Set another prompt from the next chunk that has not been begun on. Raises RequestError for one without
        words."""
        dataclasses.replace(self.request, prompt=text)
        self._place.typed.append(text)

    def fork(self, prompt: str | None = None, *, seed: int | None = None) -> GenerationStream:
        """Return another stream of the same video, which continues from here by itself: the frames so far are in both,
        and nothing of them is computed again::

            with pipeline.stream(request) as stream:
                next(stream)
                with stream.fork("a red circle moving up") as fork:
                    for one, other in zip(stream, fork):
                        show(one.frames, other.frames)

        prompt: as `prompt` of the fork alone. seed: of the fork's noise, from the next chunk on that has not been
        begun; None for the same, with which it makes the same frames. Both are asked for chunks in any order, by one
        thread at a time; each is as it would be without the other, and its recipe repeats it. Cached keys in pages
        (page_size) are shared until either stream writes to them, copy on write; those in a row are copied, as is what
        the decoder's convolutions have read. Prompts and seeds that are to come, and prompts that wait for the next
        chunk, come in both. A chunk that was begun ahead is in both.

        Raises RequestError for a prompt without words, a seed out of range, a rolling window, and when the stream is
        closed or its last chunk has been begun; ConfigError where CUDA graphs are used; PipelineBusyError while either
        computes in another thread.
        """
        # Raises for what no request may have.
        dataclasses.replace(
            self.request,
            prompt=self.request.prompt if prompt is None else prompt,
            seed=self.request.seed if seed is None else seed,
        )
        if self._is_closed:
            raise RequestError(
                f"fork: expected an open stream, got one that is closed after {self.num_frames} frames; fork it inside "
                "its `with`, before its last chunk"
            )
        with self._source.generation.turn():
            if self._failed_ahead is not None:
                raise self._failed_ahead
            self._chunks.check_fork()
            try:
                with self._source.guard():
                    twin = self._fork(seed)
            except BaseException:
                self.close()
                raise
        if prompt is not None:
            twin.prompt(prompt)
        return twin

    def _fork(self, seed: int | None) -> GenerationStream:
        if self._place.ahead is not None:
            # What the convolutions have read is that of its frames as well.
            self._place.ahead.decoded()
        self._count_products()
        recorder = self._recorder.fork()
        chunks = self._chunks.fork(recorder, seed)
        recorder.note(
            f"forked at frame {self._place.num_begun}: what was computed before is in the report of the stream it is of"
        )
        if self.request.page_size is None and self._place.num_begun:
            recorder.note("forked: its cached keys in a row were copied; pages (page_size) would be shared")
        # Nothing to go on from before the first piece.
        decode_next = None if self._place.num_begun == 0 else self._on_thread(self._decode_next.fork)
        return GenerationStream(self._source, chunks, recorder, self._place.fork(seed), decode_next=decode_next)

    def _on_thread(self, function: Callable[[], DecodeNext]) -> DecodeNext:
        """Run `function` where the decoder runs."""
        return function() if self._source.thread is None else self._source.thread.run(function)

    def _count_products(self) -> None:
        """Quantised layers, which forks have in common, count for this stream from here on."""
        self._source.count_products(self._recorder)

    def __next__(self) -> StreamedFrames:
        """Return the next chunk. Raises what `Pipeline.generate` raises; the stream is closed then. While it or a fork
        computes in another thread, PipelineBusyError, which leaves it open."""
        if self._is_closed:
            raise StopIteration
        with self._source.generation.turn():
            try:
                with self._source.guard():
                    self._count_products()
                    return self._next()
            except BaseException:
                self.close()
                raise

    def _next(self) -> StreamedFrames:
        started = self._clock()
        if self._failed_ahead is not None:
            raise self._failed_ahead
        place = self._place
        begun = self._begin_chunk() if place.ahead is None else place.ahead
        place.ahead = None
        if self._source.thread is not None and place.num_chunks >= _CHUNKS_IN_LINE:
            self._begin_ahead()
        decoded = begun.decoded()
        self._timings["decode"] += decoded.seconds
        seconds = time.perf_counter() - started
        self.rate.add(len(decoded.frames), seconds, is_first=self._num_own_chunks == 0)
        self._num_own_chunks += 1
        place.num_frames += len(decoded.frames)
        place.num_chunks += 1
        if place.kept is not None:
            place.kept.append(decoded.frames)
        return StreamedFrames(decoded.frames, begun.first_frame, begun.prompt, seconds)

    def _begin_ahead(self) -> None:
        """Denoise the next chunk, where there is one. What fails is the failure of that chunk and not of this one."""
        if self._is_closed:
            return
        try:
            self._place.ahead = self._begin_chunk()
        except StopIteration:
            return
        except Exception as error:
            self._failed_ahead = error

    def _begin_chunk(self) -> BegunChunk:
        """Denoise the next chunk and, on the thread, begin to decode it. Raises StopIteration behind the last one."""
        self._switch_prompt()
        place, started = self._place, self._clock()
        first_frame = place.num_begun
        clean = next(self._chunks)
        self._clock("denoise", started)
        place.num_begun = 1 + self._source.temporal_factor * (clean.chunk.frames.stop - 1)
        if self._source.thread is not None:
            future = self._source.thread.start(self._frames_of, clean.latents, first_frame)
            self._decoding[:] = [*(chunk for chunk in self._decoding if not chunk.done()), future]
            return BegunChunk(first_frame, place.prompt, future.result)
        return BegunChunk(first_frame, place.prompt, functools.partial(self._decoded_here, clean.latents, first_frame))

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
        """Switch, before a chunk, to the prompt that is due; of several, the last one that was typed."""
        due, place = [], self._place
        while place.scheduled and place.scheduled[0][0] <= place.num_begun:
            due.append(place.scheduled.popleft()[1])
        # The same prompt once more changes nothing when it is typed; in a request it begins again, as in `generate`.
        is_scheduled = bool(due)
        while place.typed:
            due.append(place.typed.popleft())
        if not due or (not is_scheduled and due[-1] == place.prompt):
            return
        started, place.prompt = self._clock(), due[-1]
        encoded = self._encode(place.prompt)
        place.notes += [note for note in encoded.notes[0] if note not in place.notes]
        self._clock("text", started)
        if place.num_begun == 0:
            # Nothing has been seen of the first one.
            place.request = dataclasses.replace(self.request, prompt=place.prompt)
        else:
            place.switches.append((place.num_begun, place.prompt))
        self._chunks.switch_text(encoded.conditions, self.request.switch_mode)

    def _clock(self, stage: str | None = None, since: float = 0.0) -> float:
        """Return the time once the device is done; add the seconds since another time to a stage."""
        if self._source.thread is not None and self.device.type == "cuda":
            # The other stream has its own time.
            torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        if stage is not None:
            self._timings[stage] += now - since
        return now

    def close(self) -> None:
        """No chunk follows: the pipeline is free again, unless a fork goes on. What was made stays known.

        While a chunk is computed (another thread, a hook of the model) this returns at once, and the pipeline is free
        when that chunk has ended: the computing thread gets its frames, and no chunk after it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._source.generation.release(self._release)

    def _release(self) -> None:
        """Give back what the stream holds. Nothing computes meanwhile."""
        # Whatever happens to the report, the pipeline is free again.
        with self._resources:
            self._closed_bytes = self._chunks.num_bytes
            self._chunks.report()
            decoder = self._source.decoder
            self._recorder.record_library("vae", decoder.library, decoder.implementation)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values kept on this process. A page shared with forks counts in parts that add up."""
        return self._chunks.num_bytes if self._closed_bytes is None else self._closed_bytes

    @property
    def shared_cache_bytes(self) -> int:
        """Bytes of the pages shared with a fork, or with the stream that this is a fork of."""
        return self._chunks.num_shared_bytes

    @property
    def recipe(self) -> dict[str, Any]:
        """Recipe that repeats the frames made so far: the request with their number, and every prompt and seed with its
        frame."""
        # Without a prompt whose first chunk was never finished.
        shown = tuple(switch for switch in self._place.switches if switch[0] < self.num_frames)
        seeds = tuple(switch for switch in self._place.seeds if switch[0] < self.num_frames)
        request = dataclasses.replace(
            self.request,
            num_frames=max(1, self.num_frames),
            prompt_switches=shown or None,
            seed_switches=seeds or None,
        )
        return {**self._source.recipe, "request": request.recorded(), "notes": list(self._place.notes)}

    @property
    def attention_report(self) -> AttentionReport:
        """Attention report of the chunks so far; of the cache and the decoder once the stream is closed."""
        return self._recorder.report()

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by stage: text, denoise (commits included), decode, and of the load before the first generation. With
        decodes_beside the stages overlap."""
        return dict(self._timings)

    def media(self) -> GeneratedMedia:
        """Return all frames so far. Raises ConfigError without keeps_frames, RequestError before the first chunk."""
        kept = self._place.kept
        if kept is None:
            raise ConfigError("media: a stream does not keep its frames; use stream(request, keeps_frames=True)")
        if not kept:
            raise RequestError("media: no frames have been made yet")
        return GeneratedMedia(
            frames=numpy.concatenate(kept),
            fps=self.fps,
            recipe=self.recipe,
            attention_report=self.attention_report,
            timings=self.timings,
            peak_memory=peaks(self.device),
        )


def _end_decoding(decoding: Iterable[Future[DecodedChunk]]) -> None:
    """Wait for the chunk that the thread is in; one that it has not begun is left out."""
    futures_wait([chunk for chunk in decoding if not chunk.cancel()])


def check_streamable(rules: RequestRules, settings: BatchSettings, *, endless: bool) -> None:
    """Raises RequestError for a video that is made at once, for one without an end that is made in segments or sees all
    of its frames, or whose chunks have no room in the window, for frames in between, and for a sound."""
    in_segments = settings.segments.is_apart
    if not rules.sampling.is_causal and not in_segments:
        others = "give --segment-frames, fewer than --num-frames, " if rules.sampling.continues_images else ""
        raise RequestError(
            "stream: this model makes a clip at once, and its first frame is known when its last one is; leave the "
            f"stream out, {others}or take a causal model, such as --model-path shapes-causal (docs/causal_video.md)"
        )
    if settings.shared.interpolate is not None:
        raise RequestError(
            "interpolate: the frames of a stream are given as they are made, and none between them; leave it out, or "
            "the stream"
        )
    if has_source_sound(settings) or rules.makes_sound:
        raise RequestError("stream: a file that grows has no sound, and this video has one; leave the stream out")
    if endless and in_segments:
        raise RequestError("stream: a video in segments has an end; give --num-frames or --seconds")
    if not endless:
        return
    if settings.shared.init_path is not None:
        raise RequestError("init_path: a video without an end is longer than any file; leave it out, or give it an end")
    window, chunks = window_of(settings.shared), dataclasses.replace(settings.chunking.plan, num_frames=None)
    needed = frames_needed(settings.shared, chunks, settings.sampling.history)
    if window.span is None:
        raise RequestError(
            "stream: a video without an end cannot see all of its frames; give --kv-window, such as "
            f"--kv-window {max(needed, 4 * settings.chunking.plan.chunk_frames)}, or a number of frames"
        )
    # The chunks of a short clip may be shorter than those of a video without an end.
    if window.span < needed:
        raise RequestError(
            f"stream: a video without an end has chunks of {chunks.largest} latent frames, which with a sink of "
            f"{window.sink} need --kv-window {needed} or more, got {window.span}"
        )
