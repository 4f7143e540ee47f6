"""Frame slots: where in a cache the keys of each frame are, a ring of slots behind fixed ones for the sink.

Softmax does not depend on the order of the keys, and rotary positions are in them: a frame that comes into sight takes
the slot of the one that leaves it. Nothing is moved, and addresses stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.errors import ConfigError


@dataclass(frozen=True)
class FrameSlots:
    """The slots of one video's frames, the same in every layer.

    window: which frames are in sight. num_slots: frames that there is room for. order: slot of each place, a
    permutation of range(num_slots); None for places in their own order.
    """

    window: FrameWindow
    num_slots: int
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, window: FrameWindow, num_frames: int | None, num_ahead: int = 0) -> FrameSlots:
        """Room for the frames in sight of a video of num_frames latent frames, None for one without an end. num_ahead:
        frames that are written before those of a pass that still has its whole window in sight.

        Raises ConfigError where neither bounds the other.
        """
        span = None if window.span is None else window.span + num_ahead
        sizes = [size for size in (span, num_frames) if size is not None]
        if not sizes:
            raise ConfigError("kv_window: a video without an end needs a window; give its number of latent frames")
        return cls(window, min(sizes))

    @property
    def num_ring_slots(self) -> int:
        return self.num_slots - min(self.window.sink, self.num_slots)

    def oldest_kept(self, written_to: int) -> int:
        """The first frame behind the sink whose keys are there when all before `written_to` have been written."""
        return max(self.window.sink, written_to - self.num_ring_slots)

    def slot_of(self, frame: int) -> int:
        """Return the slot of a frame of the video while it is in sight. Raises ConfigError for a frame past the end of
        a cache that keeps all of them."""
        sink = self.window.sink
        place = frame
        if frame >= self.num_slots:
            if self.window.span is None or self.num_slots < self.window.span:
                raise ConfigError(f"key-value cache: frame {frame} of a video of {self.num_slots} latent frames")
            place = sink + (frame - sink) % self.num_ring_slots
        return place if self.order is None else self.order[place]
