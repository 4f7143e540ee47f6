"""Chunks of a causal video: which latent frames are denoised together, one run after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from diffusion_runtime.attention.cache.history import CompressedHistory, HistoryPasses
from diffusion_runtime.attention.cache.passes import CachePasses, SlidingPasses
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.strength import steps_left_out

_C = TypeVar("_C")


@dataclass(frozen=True)
class Chunk:
    """Latent frames `frames` of the video, the chunk number `index` of it."""

    index: int
    frames: range


@dataclass(frozen=True)
class ChunkPlan:
    """Cut of a video: chunks of chunk_frames latent frames, a first one of first_chunk_frames (None for as many; 1 for
    models trained on [1, N, N, ...]), and a last one with the rest of num_frames, None for a video without end. A plan
    for more frames begins as one for fewer whole chunks."""

    chunk_frames: int
    first_chunk_frames: int | None = None
    num_frames: int | None = None

    def __iter__(self) -> Iterator[Chunk]:
        first = self.chunk_frames if self.first_chunk_frames is None else self.first_chunk_frames
        start = 0
        for index in itertools.count():
            if start == self.num_frames:
                return
            stop = start + (first if index == 0 else self.chunk_frames)
            stop = stop if self.num_frames is None else min(stop, self.num_frames)
            yield Chunk(index, range(start, stop))
            start = stop

    @property
    def num_chunks(self) -> int | None:
        """None for a video without an end."""
        return None if self.num_frames is None else sum(1 for _ in self)

    @property
    def largest(self) -> int:
        """Latent frames of the longest chunk."""
        longest = max(self.chunk_frames, self.first_chunk_frames or 0)
        return longest if self.num_frames is None else min(longest, self.num_frames)


def chunks_of(request: GenerationRequest, num_frames: int | None) -> ChunkPlan:
    """Return how a resolved request of a causal model cuts a video. num_frames: latent frames, None for a video without
    end."""
    assert request.chunk_frames is not None, "a causal model has a default"
    return ChunkPlan(request.chunk_frames, request.first_chunk_frames, num_frames)


def window_of(request: GenerationRequest) -> FrameWindow:
    """Which frames its chunks have in sight. Raises ConfigError for a window without room next to the sink."""
    return FrameWindow(request.kv_sink or 0, request.kv_window or None)


def cache_passes(
    request: GenerationRequest,
    chunks: ChunkPlan,
    grid: tuple[int, int, int],
    history: CompressedHistory | None = None,
    latents: tuple[int, ...] = (),
) -> CachePasses:
    """Return what the passes over the frames of a video read and write. In a rolling window the commit of a chunk sees
    clean frames in place of the noisy ones after it, so both have room, as in the authors' cache.

    grid: of the video's tokens. history: of a model with one, and the shape of the video's latents. Raises ConfigError
    for a video without an end or a window.
    """
    window, (_, height, width) = window_of(request), grid
    longest = longest_pass(request, chunks)
    if history is None:
        slots = FrameSlots.of(window, chunks.num_frames, longest - chunks.largest)
        return SlidingPasses(slots, height * width, longest)
    max_full, max_compressed, span = (history.full_chunks + 1) * chunks.largest, None, window.span
    if chunks.num_frames is not None:
        max_full = min(max_full, chunks.num_frames)
        span = None if span is None or span >= chunks.num_frames else span
        # The last chunk is denoised, and the full ones before it are never compressed.
        in_full = list(chunks)[-history.full_chunks - 1 :]
        max_compressed = in_full[0].frames.start
    _, height_compressed, width_compressed = history.grid(latents)
    return HistoryPasses(
        FrameWindow(window.sink, None if span is None else span - max_full),
        tokens_per_frame=height * width,
        tokens_per_compressed=height_compressed * width_compressed,
        max_full=max_full,
        max_compressed=max_compressed,
    )


def guided_frames(request: GenerationRequest, chunks: ChunkPlan) -> int | None:
    """Latent frames of the first chunks, those with guidance; None where it does not end with a chunk, as in a rolling
    window, whose passes have several."""
    if request.guided_chunks is None or is_rolling(request):
        return None
    ends = (chunk.frames.stop for chunk in itertools.islice(chunks, request.guided_chunks))
    return max(ends, default=0)


def cached_tokens(passes: CachePasses, request: GenerationRequest, chunks: ChunkPlan, *, is_guided: bool) -> int:
    """Tokens of the video for which a cache with these passes has room, of all guidance branches together."""
    if not is_guided:
        return passes.capacity
    frames = guided_frames(request, chunks)
    return passes.capacity + (passes.capacity if frames is None else passes.capacity_for(frames))


def is_rolling(request: GenerationRequest) -> bool:
    """Return True if several chunks are denoised at once (denoising/rolling_window.py)."""
    return request.chunk_schedule == "rolling"


def steps_of_chunk(request: GenerationRequest, index: int) -> int:
    """Denoising steps of the chunk number `index` of a video that run."""
    first = request.first_chunk_steps if index == 0 else None
    num_steps = (request.num_inference_steps or 1) if first is None else first
    return num_steps - steps_left_out(request, num_steps)


def commits_of(recent: Sequence[_C], history: CompressedHistory | None) -> list[tuple[_C, str]]:
    """Which chunks are encoded after one has become clean, and how: see CachePasses.plan. recent: the last chunks, that
    one included; of a model with a history, full_chunks + 1 of them where there are as many."""
    if history is None:
        return [(recent[-1], "commit")]
    split = max(0, len(recent) - history.full_chunks)
    return [(chunk, "compress") for chunk in recent[:split]] + [(chunk, "commit") for chunk in recent[split:]]


def passes_of(
    request: GenerationRequest, chunks: ChunkPlan, history: CompressedHistory | None = None
) -> Iterator[tuple[range, str]]:
    """Yield the frames and the kind (CachePasses.plan) of every forward pass of a video with an end, in order."""
    num_steps, of_video = steps_of_chunk(request, 1), list(chunks)
    # A rolling window has a chunk more at every pass, until they run out, and ends with the last one alone.
    for index in range(len(of_video) + num_steps - 1) if is_rolling(request) else ():
        window = of_video[max(0, index - num_steps + 1) : index + 1]
        yield range(window[0].frames.start, window[-1].frames.stop), "denoise"
        if index >= num_steps - 1 and window[0] is not of_video[-1]:
            yield window[0].frames, "commit"
    for chunk in () if is_rolling(request) else of_video:
        yield from [(chunk.frames, "denoise")] * steps_of_chunk(request, chunk.index)
        if chunk is not of_video[-1]:
            num_recent = 1 if history is None else history.full_chunks + 1
            recent = of_video[max(0, chunk.index + 1 - num_recent) : chunk.index + 1]
            yield from ((each.frames, kind) for each, kind in commits_of(recent, history))


def frames_needed(request: GenerationRequest, chunks: ChunkPlan, history: CompressedHistory | None) -> int:
    """Return the smallest window of latent frames with room for the sink and the frames next to it."""
    sink, longest = request.kv_sink or 0, longest_pass(request, chunks)
    if history is None:
        return sink + longest
    # A chunk, the full ones before it, and one that is encoded in large patches.
    needed = sink + (history.full_chunks + 2) * chunks.largest
    return needed if chunks.num_frames is None else min(needed, chunks.num_frames)


def longest_pass(request: GenerationRequest, chunks: ChunkPlan) -> int:
    """Latent frames of its longest forward pass."""
    longest = chunks.largest * ((request.num_inference_steps or 1) if is_rolling(request) else 1)
    return longest if chunks.num_frames is None else min(longest, chunks.num_frames)
