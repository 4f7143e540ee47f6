"""Segments: a long video cut into clips of one length that share frames, made one after the other.

Of two kinds. `continued`: a segment begins with the last frames of the one before, from noise of its own, and the last
one reaches beyond the video, where it is cut off. `blended`: segments of a video that is there already are made apart,
from the same noise, the last one ends with the video, and frames that two of them share are blended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from diffusion_runtime.core.latent_geometry import misfit
from diffusion_runtime.errors import RequestError

SegmentKind: TypeAlias = Literal["continued", "blended"]


@dataclass(frozen=True)
class Segment:
    """One segment. start: its first frame in the video. num_frames: its length; num_shared: how many of its first
    frames the one before has as well; num_frames_of_video: of all segments together, those beyond the video left out.
    num_drawn: how many times as much noise earlier ones have drawn."""

    index: int
    start: int
    num_frames: int
    num_shared: int
    num_frames_of_video: int
    num_drawn: int = 0


@dataclass(frozen=True)
class SegmentPlan:
    """Cut of a video of num_frames. longest: frames of a segment of a longer video. overlap: frames that a segment
    shares with the one before, or more. kind: None for a model that makes a video at once."""

    num_frames: int
    longest: int
    overlap: int = 0
    kind: SegmentKind | None = None

    @property
    def is_apart(self) -> bool:
        """True where every request is made by itself, segment after segment: those of the blended kind read the seed
        before the first step."""
        return self.kind == "blended" or len(self) > 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The first frame of each segment that the one before has not."""
        return tuple(segment.start + segment.num_shared for segment in self)

    @property
    def is_blended(self) -> bool:
        """True for segments of the blended kind."""
        return self.kind == "blended"

    @property
    def length(self) -> int:
        """Frames of each segment."""
        return min(self.num_frames, self.longest)

    def __len__(self) -> int:
        if self.num_frames <= self.longest:
            return 1
        return -(-(self.num_frames - self.overlap) // (self.length - self.overlap))

    def __iter__(self) -> Iterator[Segment]:
        stop = 0
        for index in range(len(self)):
            start = index * (self.length - self.overlap)
            if self.is_blended:
                start = min(start, self.num_frames - self.length)
            num_shared, drawn = (stop - start if index else 0), (0 if self.is_blended else index)
            yield Segment(index, start, self.length, num_shared, self.num_frames, drawn)
            stop = start + self.length

    @property
    def note(self) -> str | None:
        """The sentence on how a longer video is made; None of one that is made at once."""
        if len(self) == 1:
            return None
        some = f"{self.overlap} frame{'s' * (self.overlap != 1)}"
        shared = f"blended over {some} or more"
        if not self.is_blended:
            shared = f"each from the last {'frame' if self.overlap == 1 else some} of the one before"
        return f"made in {len(self)} segments of {self.length} frames, {shared}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on segments that share most of their frames."""
        new = self.length - self.overlap
        if len(self) == 1 or self.overlap <= new:
            return ()
        return (
            f"segment_overlap: each segment adds {new} frame{'s' * (new != 1)}, so that every frame is made about "
            f"{self.length / new:.1f} times; a smaller one (--segment-overlap) takes less time",
        )

    def check(self, frame_rule: tuple[int, int], num_seeds: int = 0) -> None:
        """Check length and overlap, and how many segments have a seed. frame_rule: of LatentGeometry. Raises
        RequestError."""
        if self.kind is None:
            return
        step, remainder = frame_rule
        if self.longest % step != remainder % step:
            raise RequestError(misfit("segment_frames", self.longest, step, remainder))
        # There is nothing else to continue.
        least = 0 if self.is_blended else 1
        if not least <= self.overlap < self.longest:
            raise RequestError(
                f"segment_overlap: expected {least} to {self.longest - 1}, less than segment_frames, got {self.overlap}"
            )
        if num_seeds and not self.is_apart:
            raise RequestError("segment_seeds: the video is one segment, whose seed is --seed; leave segment_seeds out")
        if num_seeds > len(self):
            raise RequestError(
                f"segment_seeds: expected at most {len(self)}, one for each segment of the video, got {num_seeds}"
            )

    def shorter(self, step: int) -> int | None:
        """Return about half of the length, 1 more than a multiple of step; None where that is not less."""
        half = (self.length // 2 - 1) // step * step + 1
        return half if self.overlap < half < self.length else None
