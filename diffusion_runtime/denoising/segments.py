"""Segments: a video that is longer than its model makes at once, cut into clips of one length, each of which begins
with the last frames of the one before.

Every segment is denoised by itself from noise of its own; the frames that two of them share are written once. The last
one reaches beyond the video, and what is beyond is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """One segment. start: its first frame in the video. num_frames: its length; num_known: how many of its first frames
    the segment before has made. num_frames_of_video: of all segments together, those beyond the video left out."""

    index: int
    start: int
    num_frames: int
    num_known: int
    num_frames_of_video: int


@dataclass(frozen=True)
class SegmentPlan:
    """Cut of a video of num_frames. length: frames of a segment, at most num_frames. overlap: frames that a segment
    shares with the one before."""

    num_frames: int
    length: int
    overlap: int = 0

    def __len__(self) -> int:
        if self.num_frames <= self.length:
            return 1
        step = self.length - self.overlap
        return -(-(self.num_frames - self.overlap) // step)

    def __iter__(self) -> Iterator[Segment]:
        for index in range(len(self)):
            start = index * (self.length - self.overlap)
            yield Segment(index, start, self.length, self.overlap if index else 0, self.num_frames)
