"""Frame window: which past frames a chunk attends to, a sliding window with attention sinks."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.errors import ConfigError


@dataclass(frozen=True)
class FrameWindow:
    """Frames in sight of a chunk, counted in latent frames as Self-Forcing (arXiv:2506.08009) and LongLive
    (arXiv:2509.22622) count them.

    sink: first frames of the video, which stay in sight. span: frames in sight, sink and the chunk's own included; None
    for all. Raises ConfigError for a span without room besides the sink.
    """

    sink: int = 0
    span: int | None = None

    def __post_init__(self) -> None:
        if self.sink < 0 or (self.span is not None and self.span <= self.sink):
            raise ConfigError(
                f"frame window: expected a sink of 0 or more frames and a span above it, got sink {self.sink} and span "
                f"{self.span}"
            )

    def visible(self, first: int, count: int, oldest: int = 0) -> tuple[range, range]:
        """The past frames (of the sink, recent ones) that the chunk of `count` frames from `first` on attends to.

        oldest: recent frames before it are no longer there, or not yet.
        """
        recent_from = max(self.sink, oldest)
        if self.span is not None:
            recent_from = max(recent_from, first + count - (self.span - self.sink))
        return range(min(self.sink, first)), range(min(recent_from, first), first)
