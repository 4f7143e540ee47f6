"""Predicted length: the number of frames of a video whose length its model chooses for the prompt, within bounds."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.errors import RequestError

# The request fields that leave the length open, and that say it.
BOUNDS = ("min_seconds", "max_seconds")


@dataclass(frozen=True)
class LengthBounds:
    """Bounds of a predicted length, in seconds. frame_rule: (step, remainder) of the numbers of frames that the model
    makes. Raises RequestError for bounds that leave nothing."""

    min_seconds: float
    max_seconds: float
    fps: int
    frame_rule: tuple[int, int]

    def __post_init__(self) -> None:
        if self.min_seconds >= self.max_seconds:
            raise RequestError(
                f"max_seconds: expected more than min_seconds, {self.min_seconds:g}, got {self.max_seconds:g}; the "
                "length is chosen for the prompt between them, and --seconds sets it"
            )

    @property
    def longest(self) -> int:
        """Number of frames of the longest video."""
        return self.num_frames(self.max_seconds)

    def num_frames(self, seconds: float) -> int:
        """Return the number of frames for a predicted length, as diffusers' LTX2DurationHead does: the bounds count
        first, then it is rounded down to what the model makes, or up where that is shorter than the least. Bounds
        between which the model makes nothing give the nearest."""
        step, remainder = self.frame_rule
        least, most = max(1, round(self.min_seconds * self.fps)), round(self.max_seconds * self.fps)
        wanted = max(least, round(min(max(seconds, self.min_seconds), self.max_seconds) * self.fps))
        below = (wanted - remainder) // step * step + remainder
        above = below + step
        if below >= least:
            return below
        return above if above <= most or abs(above - wanted) < abs(below - wanted) else below
