"""Exact tiles of transformer blocks with neighbourhood attention: one block after the other, each in tiles with a halo.

A token sees the window around it and no more, so a block's tile reads the tokens that its windows reach (the halo), and
nothing is blended: what comes out is the block of the whole grid, to rounding. Tiles of rows lie within slabs of
frames. A slab replaces its input, of which the frames that the next one sees are kept, so that beside one tensor of the
whole grid there is memory for one slab and the activations of one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# Frames of a slab.
DEPTH = 16
# Own tokens of a tile, and the fewest rows it has.
MAX_TOKENS, MIN_ROWS = 2**17, 8

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Span:
    """Part of one axis. own: the places that are computed; read: those that their windows reach."""

    own: slice
    read: slice

    @property
    def within(self) -> slice:
        """Own places among those that are read."""
        return slice(self.own.start - self.read.start, self.own.stop - self.read.start)


@dataclass(frozen=True)
class Tile:
    """Frames and rows of a tile, of whole rows. origin: of its own tokens among those that are read."""

    frames: Span
    rows: Span

    @property
    def origin(self) -> Grid:
        return self.frames.within.start, self.rows.within.start, 0

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the own tokens of those that are read, [1, frames, rows, width, ...]."""
        return x[:, self.frames.within, self.rows.within]

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the tile reads of the whole grid, [1, frames, height, width, ...]."""
        return x[:, self.frames.read, self.rows.read]


def spans_of(length: int, size: int, window: int) -> list[Span]:
    """Return the parts of an axis, `size` places each. A window is moved inward at the ends, so one there reaches
    further than its half."""
    window = min(window, length)
    spans = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = max(0, min(start - window // 2, length - window))
        last = min(length, max(stop + (window - 1) // 2, window))
        spans.append(Span(slice(start, stop), slice(first, last)))
    return spans


def rows_of_tile(grid: Grid) -> int:
    """Return the rows of a tile. grid: frames, height and width in tokens."""
    return max(MIN_ROWS, MAX_TOKENS // (min(DEPTH, grid[0]) * grid[2]))


def overwrite_in_tiles(x: torch.Tensor, window: Grid, compute: Callable[[torch.Tensor, Tile], torch.Tensor]) -> None:
    """Replace x [1, frames, height, width, channels] by what a block makes of it. compute: (tokens that a tile reads,
    the tile) -> its own tokens."""
    _, num_frames, height, width, _ = x.shape
    slabs = spans_of(num_frames, DEPTH, window[0])
    bands = spans_of(height, rows_of_tile((num_frames, height, width)), window[1])
    kept = x[:, :0]
    for index, frames in enumerate(slabs):
        seen = torch.cat([kept, x[:, frames.own.start : frames.read.stop]], dim=1)
        following = slabs[min(index + 1, len(slabs) - 1)].read.start
        kept = seen[:, following - frames.read.start : frames.within.stop].clone()
        for rows in bands:
            x[:, frames.own, rows.own] = compute(seen[:, :, rows.read], Tile(frames, rows))


def slabs_of(num_frames: int) -> Iterator[slice]:
    """Yield slabs of frames, for what each token is computed by itself."""
    return (span.own for span in spans_of(num_frames, DEPTH, 1))


def tokens_beside(grid: Grid, window: Grid) -> tuple[int, int]:
    """Return the tokens of the largest slab with its halo, held twice in part, and of the largest tile with its own."""
    frames = min(grid[0], DEPTH + window[0] - 1)
    rows = min(grid[1], rows_of_tile(grid) + window[1] - 1)
    return 2 * frames * grid[1] * grid[2], frames * rows * grid[2]
