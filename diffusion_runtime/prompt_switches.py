"""Prompt switches: another prompt from some frame on, in videos that are made chunk by chunk.

A switch applies to whole chunks: from the first chunk that begins at its frame or later.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from diffusion_runtime.denoising.chunks import Chunk, ChunkPlan
from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.request_fields import MAX_COUNT, Text

# (frame of the video, or a time of it as "5s", prompt).
PromptSwitch: TypeAlias = tuple[int | str, str]
# What becomes of the keys and values in sight when the prompt changes.
SWITCH_MODES = ("recache", "recache_at_once", "keep")
MAX_SWITCHES = 1000

_TIME = re.compile(r"(?:(?P<minutes>\d{1,5})m)?(?:(?P<seconds>\d{1,7}(?:\.\d{1,3})?)s)?")
_FORMS = "5s, 1m30s, 2.5s, or a frame as 48f"


@dataclass(frozen=True)
class PromptSwitches:
    """Check of a tuple of PromptSwitch."""

    metavar: ClassVar[str] = "TIME PROMPT"
    # Of the flag, which may be given again.
    kind: ClassVar[Any] = list[str]

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, tuple) or not value or not all(_is_pair(item) for item in value):
            raise RequestError(
                f"{name}: expected pairs of a time and a prompt, such as [5s, a red circle], got {shown(value)}"
            )
        if len(value) > MAX_SWITCHES:
            raise RequestError(f"{name}: expected at most {MAX_SWITCHES} prompts, got {len(value)}")
        for at, prompt in value:
            Text(needs_words=True)(f"{name}, at {at}", prompt)
            if isinstance(at, str):
                seconds_of(at, name)
            elif type(at) is not int or not 1 <= at <= MAX_COUNT:
                raise RequestError(
                    f"{name}: expected a frame from 1 to {MAX_COUNT}, or a time ({_FORMS}), got {shown(at)}"
                )


def parse_switches(value: object) -> object:
    """Lists of pairs, or of texts as "5s a blue star", as tuples, `48f` as the frame 48; anything else as it is, for
    PromptSwitches to refuse. None for an empty list."""
    if not isinstance(value, list | tuple):
        return value
    pairs = [item.strip().split(None, 1) if isinstance(item, str) else item for item in value]
    return tuple((_frame(item[0]), item[1]) if _is_pair(item) else item for item in pairs) or None


def seconds_of(at: str, name: str) -> float:
    """`5s` or `1m30s` in seconds. Raises RequestError that names the field for any other text."""
    found = _TIME.fullmatch(at.strip()) if at.strip() else None
    if found is None:
        raise RequestError(f"{name}: expected a time ({_FORMS}), got {shown(at)}")
    return 60 * int(found["minutes"] or 0) + float(found["seconds"] or 0)


def resolve_switches(
    switches: Iterable[PromptSwitch], chunks: ChunkPlan, *, fps: int, num_frames: int, temporal_factor: int, name: str
) -> tuple[tuple[int, str], ...]:
    """The switches in their order, each at the first frame of the chunk that it applies to.

    chunks: of the video; fps: frames per second; num_frames: of the video in pixels; temporal_factor: frames of every
    latent frame but the first. name: of the field. Raises RequestError for one behind the last chunk's first frame, and
    for two that apply to the same chunk.
    """
    starts = [first_frame(chunk, temporal_factor) for chunk in chunks]
    resolved: list[tuple[int, str, int | str]] = []
    for at, prompt in switches:
        frame = round(seconds_of(at, name) * fps) if isinstance(at, str) else at
        start = next((start for start in starts if start >= max(frame, 1)), None)
        if start is None:
            length = f"{num_frames} frames at {fps} frames per second ({num_frames / fps:g} s)"
            last = f"the last chunk begins at frame {starts[-1]}" if len(starts) > 1 else "it is one chunk"
            raise RequestError(
                f"{name}: {shown(at)} is past the end: the video has {length}, and {last}; give more num_frames"
            )
        resolved.append((start, prompt, at))
    resolved.sort(key=lambda switch: switch[0])
    for one, other in itertools.pairwise(resolved):
        if one[0] == other[0]:
            raise RequestError(
                f"{name}: {shown(one[2])} and {shown(other[2])} are the same chunk, which begins at frame {one[0]}; "
                "leave one out, or move it by a chunk"
            )
    return tuple((start, prompt) for start, prompt, _ in resolved)


def first_frame(chunk: Chunk, temporal_factor: int) -> int:
    """The first of a chunk's frames in the video, in pixels: the first latent frame is one frame."""
    start = chunk.frames.start
    return 0 if start == 0 else 1 + temporal_factor * (start - 1)


def _is_pair(item: object) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2


def _frame(at: object) -> object:
    """`48f` and `48` as a number."""
    if isinstance(at, str) and (digits := at.strip().removesuffix("f")).isdecimal() and len(digits) <= 9:
        return int(digits)
    return at
