"""TokenLayout: the sequence as text, a frames x height x width grid, text; with valid lengths (padding)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Self, TypeAlias

from diffusion_runtime.errors import ConfigError

# Frames, height and width, in tokens.
Extent: TypeAlias = tuple[int, int, int]

# Tiles of one token: the grid's tokens come frame by frame, row by row.
RASTER: Extent = (1, 1, 1)


@dataclass(frozen=True)
class TokenLayout:
    """Layout of the key sequence of one attention call; in self-attention the queries have the same layout.

    grid: (frames, height, width) in tokens, after patchify; (0, 0, 0) when there is text only.
    num_prefix_tokens, num_suffix_tokens: text before and after the grid, padding included.
    valid_lengths: for each sample of the batch how many of its text tokens are real; they come first in the text
        and the rest is never attended to. None when all are. Needs the text on one side of the grid.
    tile: the grid's tokens come tile by tile, boxes of (frames, height, width) tokens in raster order, cut off at the
        grid's end; raster order inside each.
    text_segments: lengths of the runs that the text consists of, in order, such as a sound and a prompt, where the
        model was trained with tiles of them (VSA-H3); None where text is in no tiles.
    num_given_tokens: of the text after the grid, how many of its first tokens are no prompt's: of reference images, of
        a sound, of filling.

    Raises ConfigError for negative counts, for lengths that do not fit and for tiles without tokens.
    """

    grid: Extent
    num_prefix_tokens: int = 0
    num_suffix_tokens: int = 0
    valid_lengths: tuple[int, ...] | None = None
    tile: Extent = RASTER
    text_segments: tuple[int, ...] | None = None
    num_given_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.grid) != 3 or min(*self.grid, self.num_prefix_tokens, self.num_suffix_tokens) < 0:
            raise ConfigError(f"TokenLayout: expected a grid (T, H, W) and token counts of 0 or more, got {self!r}")
        if len(self.tile) != 3 or min(self.tile) < 1:
            raise ConfigError(f"TokenLayout: expected a tile (T, H, W) of 1 token or more on each axis, got {self!r}")
        if not 0 <= self.num_given_tokens <= self.num_suffix_tokens:
            raise ConfigError(f"TokenLayout: num_given_tokens must lie in 0..{self.num_suffix_tokens}, got {self!r}")
        object.__setattr__(self, "grid", tuple(self.grid))
        object.__setattr__(self, "tile", tuple(self.tile))
        self._check_segments()
        if self.valid_lengths is None:
            return
        object.__setattr__(self, "valid_lengths", tuple(int(length) for length in self.valid_lengths))
        if self.num_prefix_tokens and self.num_suffix_tokens:
            raise ConfigError("TokenLayout: valid_lengths needs the text on one side of the grid, not on both")
        wrong = [length for length in self.valid_lengths if not 0 <= length <= self.num_text_tokens]
        if wrong:
            raise ConfigError(f"TokenLayout: valid_lengths must lie in 0..{self.num_text_tokens}, got {wrong}")

    def _check_segments(self) -> None:
        if self.text_segments is None:
            return
        segments = tuple(int(length) for length in self.text_segments)
        object.__setattr__(self, "text_segments", segments)
        ends = {0, *itertools.accumulate(segments)}
        if min(segments, default=0) < 0 or sum(segments) != self.num_text_tokens or self.num_prefix_tokens not in ends:
            raise ConfigError(
                f"TokenLayout: text_segments must be lengths of 0 or more that make up the {self.num_prefix_tokens} "
                f"tokens before the grid and the {self.num_suffix_tokens} after it, got {list(segments)}"
            )

    @classmethod
    def text(cls, num_tokens: int, valid_lengths: tuple[int, ...] | None = None) -> Self:
        """Return the layout of a sequence that is text alone, such as the keys of a cross-attention."""
        return cls((0, 0, 0), num_suffix_tokens=num_tokens, valid_lengths=valid_lengths)

    @property
    def num_grid_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def num_text_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_suffix_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_text_tokens - self.num_given_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_grid_tokens + self.num_text_tokens

    @functools.cached_property
    def has_padding(self) -> bool:
        """True if some sample has fewer valid text tokens than there is room for."""
        return self.valid_lengths is not None and any(n < self.num_text_tokens for n in self.valid_lengths)

    def part(self, num_grid_tokens: int, *, with_text: bool) -> Self:
        """Return the layout of keys that are a run of the grid's tokens, with the text around them or without."""
        run = (1, 1, num_grid_tokens)
        return dataclasses.replace(self, grid=run, tile=RASTER, text_segments=None) if with_text else type(self)(run)

    def key_ranges(self, sample: int) -> tuple[tuple[int, int], ...]:
        """Return the non-empty [start, stop) ranges of the sequence that `sample` attends to, in order."""
        if self.valid_lengths is None:
            ranges = [(0, self.num_tokens)]
        elif self.num_prefix_tokens:
            ranges = [(0, self.valid_lengths[sample]), (self.num_prefix_tokens, self.num_tokens)]
        else:
            ranges = [(0, self.num_grid_tokens + self.valid_lengths[sample])]
        merged: list[tuple[int, int]] = []
        for start, stop in ranges:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            elif stop > start:
                merged.append((start, stop))
        return tuple(merged)


@dataclass(frozen=True)
class CachedLayout(TokenLayout):
    """A grid of queries, and the keys of a cache: those of the frames in sight, the queries' own among them.

    grid: of the keys, a frame for each slot that is read; it does not give the order in the video. num_query_frames:
    of the queries' grid, whose height and width are the keys'. key_frames: the latent frame of the video that each
    frame of keys is. Keys of frames of two sizes are one row, and their queries' grid is not known here.
    """

    num_query_frames: int = 0
    key_frames: tuple[int, ...] = ()
