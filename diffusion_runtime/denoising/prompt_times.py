"""When prompts and seeds change: from the first chunk, or segment, that begins at a switch's frame or later."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from diffusion_runtime.denoising.chunks import Chunk, ChunkPlan
from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.request.prompt_switches import seconds_of

T = TypeVar("T", str, int)


def resolve_switches(
    switches: Iterable[tuple[int | str, T]],
    starts: Sequence[int],
    length: tuple[int, int],
    *,
    field: str,
    what: str,
    part: str,
) -> tuple[tuple[int, T], ...]:
    """Return the switches in their order, each at the first frame of the part that it applies to.

    starts: the first frame of each part of the video, in pixels; length: of the video, in frames per second and frames.
    field: for messages; what: changes; part: what the video is made of. Raises RequestError for one behind the last
    part's first frame or on the video's, and for two that apply to the same part.
    """
    fps, num_frames = length
    resolved: list[tuple[int, T, int | str]] = []
    for at, value in switches:
        frame = round(seconds_of(at, field) * fps) if isinstance(at, str) else at
        if frame < 1:
            raise RequestError(
                f"{field}: {shown(at)} is the video's first frame, which is of the {what}; give a later time"
            )
        start = next((start for start in starts if start >= frame), None)
        if start is None:
            video = f"{num_frames} frames at {fps} frames per second ({num_frames / fps:g} s)"
            last = f"the last {part} begins at frame {starts[-1]}" if len(starts) > 1 else f"it is one {part}"
            raise RequestError(
                f"{field}: {shown(at)} is past the end: the video has {video}, and {last}; "
                "give more --seconds or --num-frames"
            )
        resolved.append((start, value, at))
    resolved.sort(key=lambda switch: switch[0])
    for one, other in itertools.pairwise(resolved):
        if one[0] == other[0]:
            raise RequestError(
                f"{field}: {shown(one[2])} and {shown(other[2])} are the same {part}, which begins at frame {one[0]}; "
                f"leave one out, or move it by a {part}"
            )
    return tuple((start, value) for start, value, _ in resolved)


def first_frame(chunk: Chunk, temporal_factor: int) -> int:
    """Return the first of a chunk's frames in the video, in pixels: the first latent frame is one frame."""
    start = chunk.frames.start
    return 0 if start == 0 else 1 + temporal_factor * (start - 1)


def chunk_at(frame: int | str, chunks: ChunkPlan, temporal_factor: int) -> int:
    """Return the chunk that begins at a frame of the video, in pixels, as request rules put it."""
    return next(chunk.index for chunk in chunks if first_frame(chunk, temporal_factor) >= int(frame))
