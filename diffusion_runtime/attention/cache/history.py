"""Compressed history: a key-value cache whose older frames are in larger patches (FAR, arXiv:2503.19325).

The last chunks of a video are kept token by token, those before them in patches some times as large. When a chunk is
clean, the one that is now too old is encoded again in large patches, and then the last ones, which have another past
than before. A chunk attends to itself and to what came before it, never to what comes after, so what large patches left
earlier stays as it is: a video of n chunks takes about full_chunks + 1 further passes per chunk, where encoding the
whole history under a block-causal mask takes n.

    [.. frame 1 | frame 0 |] [chunk n-2 | chunk n-1 | chunk n]
     <- compressed           ^ pivot     full ->

Compressed frames lie before a fixed place, the pivot, and full ones behind it, so what is in sight is one run of the
cache. All full chunks are written again after each chunk, so they need no ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from diffusion_runtime.attention.cache.copies import TokenCopy
from diffusion_runtime.attention.cache.passes import CachePasses
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.core.token_layout import CachedLayout, TokenLayout


@dataclass(frozen=True)
class CompressedHistory:
    """full_chunks: past chunks that are kept token by token. patch: latents per token in (frames, height, width) of
    those before; latents that do not fill one, at the lower and right edge, are left out."""

    full_chunks: int
    patch: tuple[int, int, int]

    def grid(self, latents: Sequence[int]) -> tuple[int, int, int]:
        """Tokens of latents whose shape ends in frames, height, width."""
        frames, height, width = (size // side for size, side in zip(latents[-3:], self.patch, strict=True))
        return frames, height, width


@dataclass(frozen=True)
class HistoryPlan(CachePlan):
    """A plan whose keys in sight have two sizes: first those of compressed frames, then those of full ones.

    is_compressed: whether this pass has large patches; tokens_per_frame are then theirs. write, read: tokens of the
    cache in place of slots, as runs: see runs_written, runs_read. in_sight, room: tokens.
    """

    is_compressed: bool = False
    runs_written: tuple[tuple[int, int], ...] = ()
    runs_read: tuple[tuple[int, int], ...] = ()
    room: int = 0

    @property
    def num_keys(self) -> int:
        return sum(stop - start for start, stop in self.runs_read)

    @property
    def capacity(self) -> int:
        return self.room

    @cached_property
    def write_copies(self) -> tuple[TokenCopy, ...]:
        copies, here = [], 0
        for start, stop in self.runs_written:
            copies.append(TokenCopy(slice(here, here + stop - start), slice(start, stop)))
            here += stop - start
        return tuple(copies)

    @cached_property
    def read_run(self) -> slice | None:
        return slice(*self.runs_read[0]) if len(self.runs_read) == 1 else None

    @cached_property
    def read_copies(self) -> tuple[TokenCopy, ...]:
        copies, here = [], 0
        for start, stop in self.runs_read:
            copies.append(TokenCopy(slice(here, here + stop - start), slice(start, stop)))
            here += stop - start
        return tuple(copies)

    @cached_property
    def own_copies(self) -> tuple[TokenCopy, ...]:
        copies = []
        for here, cached in self.write_copies:
            # What a pass writes it also sees, and a frame is in one run.
            place = next(at for at in self.read_copies if at.cached.start <= cached.start < at.cached.stop)
            start = place.here.start + cached.start - place.cached.start
            copies.append(TokenCopy(here, slice(start, start + here.stop - here.start)))
        return tuple(copies)

    @cached_property
    def past_copies(self) -> tuple[TokenCopy, ...]:
        written = [(cached.start, cached.stop) for _, cached in self.write_copies]
        copies, here = [], 0
        for start, stop in self.runs_read:
            # A frame is written whole, so a run in sight ends or begins with what this pass writes of it.
            inside = sorted(run for run in written if start <= run[0] < stop)
            bounds = [start, *(bound for run in inside for bound in run), stop]
            for left, right in zip(bounds[::2], bounds[1::2], strict=True):
                if left < right:
                    copies.append(TokenCopy(slice(here, here + right - left), slice(left, right)))
                    here += right - left
        return tuple(copies)

    @property
    def run_unit(self) -> int:
        return math.gcd(self.room, *(bound for run in (*self.runs_read, *self.runs_written) for bound in run))

    def key_layout(self, _: tuple[int, int, int]) -> CachedLayout:
        """Frames of two sizes are no grid: their tokens are one row."""
        return CachedLayout((1, 1, self.num_keys), key_frames=self.key_frames)

    def whole_layout(self, _: tuple[int, int, int]) -> TokenLayout:
        return TokenLayout((1, 1, self.room))


class HistoryPasses(CachePasses):
    """tokens_per_frame, tokens_per_compressed: of a frame of either size. max_full: frames of the longest pass and of
    the chunks that it sees token by token. max_compressed: of all others that a video has, None without an end; window:
    of these alone."""

    def __init__(
        self,
        window: FrameWindow,
        *,
        tokens_per_frame: int,
        tokens_per_compressed: int,
        max_full: int,
        max_compressed: int | None,
    ) -> None:
        self.window = window
        self._slots = FrameSlots.of(window, max_compressed)
        self.num_compressed = self._slots.num_slots
        self.num_slots = self.num_compressed + max_full
        self._sizes = {True: tokens_per_compressed, False: tokens_per_frame}
        self._pivot = self.num_compressed * tokens_per_compressed
        self.capacity = self._pivot + max_full * tokens_per_frame
        self._max_full = max_full
        # The frame behind the last compressed one, with which the full ones begin.
        self._full_from = 0

    @property
    def oldest_frame(self) -> int:
        return self._slots.oldest_kept(self._full_from)

    def plan(self, frames: range, kind: str) -> CachePlan:
        is_compressed = kind == "compress"
        if is_compressed:
            self._full_from = max(self._full_from, frames.stop)
        size = self._sizes[is_compressed]
        last = frames.stop if is_compressed else self._full_from
        sink = range(min(self.window.sink, last))
        compressed = [*sink, *range(max(self.window.sink, self.oldest_frame), last)]
        runs = [self._place(frame) for frame in compressed]
        own = [self._place(frame) for frame in frames] if is_compressed else [self._full_run(frames)]
        if not is_compressed:
            runs.append(self._full_run(range(self._full_from, frames.stop)))
            compressed += range(self._full_from, frames.stop)
        return HistoryPlan(
            first_frame=frames.start,
            num_frames=len(frames),
            tokens_per_frame=size,
            phase="denoise" if kind == "denoise" else "commit",
            write=(),
            read=(),
            key_frames=tuple(compressed),
            num_slots=self.num_slots,
            max_frames=self._max_full,
            is_compressed=is_compressed,
            runs_written=tuple(own),
            runs_read=_merged(runs),
            room=self.capacity,
        )

    def _place(self, frame: int) -> tuple[int, int]:
        """The tokens of a compressed frame: from the pivot downwards, so that what is there ends at it."""
        size = self._sizes[True]
        stop = self._pivot - self._slots.slot_of(frame) * size
        return stop - size, stop

    def _full_run(self, frames: range) -> tuple[int, int]:
        size = self._sizes[False]
        start, stop = (self._pivot + (frame - self._full_from) * size for frame in (frames.start, frames.stop))
        return start, stop


def _merged(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same tokens in as few runs as there are, in memory order."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
