"""Cache passes: the plans of the forward passes of one video, one after the other."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Self

from diffusion_runtime.attention.cache.plan import CachePlan, plan_forward
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.window import FrameWindow


class CachePasses(ABC):
    """The reads and writes of a cache by the passes of one video; it remembers what has been written so far.

    window: which frames are in sight. num_slots: latent frames that there is room for, num_compressed of them in larger
    patches. capacity: tokens that there is room for.
    """

    window: FrameWindow
    num_slots: int
    capacity: int
    num_compressed: int = 0

    @property
    @abstractmethod
    def oldest_frame(self) -> int:
        """The first frame behind the sink whose keys are there; those before gave their slots away."""

    @abstractmethod
    def plan(self, frames: range, kind: str) -> CachePlan:
        """Return the plan of the next pass, over `frames`. kind: `denoise` or `commit`; `compress` is a commit in
        larger patches (attention/cache/history.py)."""

    def capacity_for(self, num_frames: int) -> int:  # noqa: ARG002 - of caches that place frames otherwise
        """Tokens that a store needs to which only the first `num_frames` latent frames of the video are written."""
        return self.capacity

    def fork(self) -> Self:
        """Return a copy for another video that continues from here."""
        # What has been written so far is a number.
        return copy.copy(self)


class SlidingPasses(CachePasses):
    """Frames of one size, behind a sliding window. max_frames: of the longest pass."""

    def __init__(self, slots: FrameSlots, tokens_per_frame: int, max_frames: int) -> None:
        self.window = slots.window
        self.num_slots = slots.num_slots
        self.capacity = slots.num_slots * tokens_per_frame
        self._slots = slots
        self._tokens_per_frame = tokens_per_frame
        self._max_frames = max_frames
        # The frame behind the last one that was written.
        self._written_to = 0

    @property
    def oldest_frame(self) -> int:
        return self._slots.oldest_kept(self._written_to)

    def capacity_for(self, num_frames: int) -> int:
        """Return the tokens needed, as CachePasses describes: in a ring that still fills, frames are stored in
        order."""
        is_ordered = self._slots.order is None
        return min(num_frames, self.num_slots) * self._tokens_per_frame if is_ordered else self.capacity

    def plan(self, frames: range, kind: str) -> CachePlan:
        self._written_to = max(self._written_to, frames.stop)
        return plan_forward(self._slots, frames, self._tokens_per_frame, kind, self.oldest_frame, self._max_frames)
