"""Cache plan: what one forward pass reads and writes of a key-value cache, the same for every layer.

Language-model servers call it the forward metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from diffusion_runtime.attention.cache.copies import TokenCopy, copies_of, run_of
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.core.token_layout import CachedLayout, TokenLayout


@dataclass(frozen=True)
class CachePlan:
    """One forward pass over consecutive frames. All counts are in latent frames, a slot is the room of one.

    first_frame, num_frames: of the video, those of this pass. tokens_per_frame: of the grid. phase: `denoise` writes
    keys that the next step overwrites, `commit` the final ones. write: the slot of each of the frames. read: slots in
    sight, those of this pass included, in memory order. key_frames: the frame that each of these holds.
    num_slots: of the cache. max_frames: of the longest pass that is expected of the same video. page_table: int32
    [batch, pages], of a store in pages; None for one in a row. write_index: `write` in tokens on the device, int64,
    where a CUDA graph reads it; None for passes that are not replayed.
    """

    first_frame: int
    num_frames: int
    tokens_per_frame: int
    phase: str
    write: tuple[int, ...]
    read: tuple[int, ...]
    key_frames: tuple[int, ...]
    num_slots: int
    max_frames: int
    page_table: torch.Tensor | None = dataclasses.field(default=None, compare=False)
    write_index: torch.Tensor | None = dataclasses.field(default=None, compare=False)

    @property
    def frames(self) -> range:
        return range(self.first_frame, self.first_frame + self.num_frames)

    @property
    def num_keys(self) -> int:
        """Tokens in sight."""
        return len(self.read) * self.tokens_per_frame

    @property
    def capacity(self) -> int:
        """Tokens that the cache has room for."""
        return self.num_slots * self.tokens_per_frame

    @cached_property
    def write_copies(self) -> tuple[TokenCopy, ...]:
        """From which tokens of the pass to which of the cache: one copy, two where the ring ends between them."""
        return copies_of(self.write, self.tokens_per_frame)

    @cached_property
    def read_run(self) -> slice | None:
        """The tokens in sight as one run of the cache's; None where they are several."""
        return run_of(self.read, self.tokens_per_frame)

    @cached_property
    def read_copies(self) -> tuple[TokenCopy, ...]:
        """To which tokens in sight from which of the cache, where they are several runs."""
        return copies_of(self.read, self.tokens_per_frame)

    @cached_property
    def own_copies(self) -> tuple[TokenCopy, ...]:
        """From which tokens of the pass to which of those in sight."""
        return copies_of([self.read.index(slot) for slot in self.write], self.tokens_per_frame)

    @cached_property
    def past_copies(self) -> tuple[TokenCopy, ...]:
        """Return the read_copies of the frames in sight that are not of this pass."""
        return copies_of([slot for slot in self.read if slot not in self.write], self.tokens_per_frame)

    @property
    def run_unit(self) -> int:
        """Tokens; every run of the cache begins and ends at a multiple of it, so that pages of it may be read."""
        return self.tokens_per_frame

    def key_layout(self, grid: tuple[int, int, int]) -> CachedLayout:
        """Return where the keys in sight sit. grid: of this pass's tokens."""
        in_sight = (len(self.read), *grid[1:])
        return CachedLayout(in_sight, num_query_frames=self.num_frames, key_frames=self.key_frames)

    def whole_layout(self, grid: tuple[int, int, int]) -> TokenLayout:
        """Return the layout of the whole cache, the same at every pass of a video. grid: of the keys in sight."""
        return TokenLayout((self.num_slots, *grid[1:]))

    @property
    def is_full(self) -> bool:
        """Return whether every slot is in sight: from then on all passes read alike."""
        return len(self.read) == self.num_slots

    def with_write_index(self, device: torch.device) -> Self:
        """The same, with the place of every token of the pass on the device."""
        tokens = [torch.arange(cached.start, cached.stop) for _, cached in self.write_copies]
        return dataclasses.replace(self, write_index=torch.cat(tokens).to(device))

    def ranks(self, frames: Sequence[int]) -> list[int]:
        """The places of frames in sight in the order of the video: their positions where a window's begin at 0."""
        places = {frame: rank for rank, frame in enumerate(sorted(self.key_frames))}
        return [places[frame] for frame in frames]


def plan_forward(
    slots: FrameSlots,
    frames: range,
    tokens_per_frame: int,
    phase: str = "denoise",
    oldest: int = 0,
    max_frames: int | None = None,
) -> CachePlan:
    """The plan of a forward pass over `frames`, whose keys take their slots. oldest: see FrameWindow.visible.
    max_frames: None where all passes are as long as this one."""
    sink, recent = slots.window.visible(frames.start, len(frames), oldest)
    in_sight = sorted((slots.slot_of(frame), frame) for several in (sink, recent, frames) for frame in several)
    return CachePlan(
        first_frame=frames.start,
        num_frames=len(frames),
        tokens_per_frame=tokens_per_frame,
        phase=phase,
        write=tuple(slots.slot_of(frame) for frame in frames),
        read=tuple(slot for slot, _ in in_sight),
        key_frames=tuple(frame for _, frame in in_sight),
        num_slots=slots.num_slots,
        max_frames=len(frames) if max_frames is None else max(max_frames, len(frames)),
    )
