"""Frames of a stream as they are handed out, and the rate at which they come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy


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
    """Rate at which a stream gave frames, without the time that its reader took.

    first_frame_seconds: from the beginning to the frames of the first chunk, the prompt's encoding included. seconds,
    num_frames: of all chunks behind it. worst_gap_seconds: the longest that one of them took.
    """

    first_frame_seconds: float = 0.0
    seconds: float = 0.0
    num_frames: int = 0
    worst_gap_seconds: float = 0.0

    def add(self, num_frames: int, seconds: float, *, is_first: bool) -> None:
        """Add one chunk."""
        if is_first:
            self.first_frame_seconds += seconds
            return
        self.seconds += seconds
        self.num_frames += num_frames
        self.worst_gap_seconds = max(self.worst_gap_seconds, seconds)

    @property
    def frames_per_second(self) -> float | None:
        """Frames per second of the chunks after the first; None while there is none."""
        return self.num_frames / self.seconds if self.num_frames else None

    def to_dict(self) -> dict[str, float]:
        """Return the values for a sidecar."""
        rate = self.frames_per_second
        return {
            "first_frame_seconds": round(self.first_frame_seconds, 4),
            **({} if rate is None else {"frames_per_second": round(rate, 3)}),
            "worst_gap_seconds": round(self.worst_gap_seconds, 4),
        }
