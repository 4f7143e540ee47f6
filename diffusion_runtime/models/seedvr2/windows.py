"""Windows of SeedVR2's attention: boxes of a grid of tokens, each of which is attended to by itself, with the text.

A window is a share of a 720p frame, 45 x 80 tokens, whatever the size of the grid (Swin, arXiv:2103.14030, with sizes
that follow the grid): a third of its height and width, and a quarter of the clip or of 30 latent frames. In every other
block the windows are moved by half of their size, so that those at the edges are smaller.

Windows of one shape are one batch of one attention call: no padding, and any backend can serve it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from diffusion_runtime.core.token_layout import Extent

# Tokens of a 720p frame, and the windows of it along frames, rows and columns.
_ROWS, _COLUMNS = 45, 80
COUNTS: Extent = (4, 3, 3)
# Latent frames of the longest clip that the number of windows along frames is for.
_MOST_FRAMES = 30

# First token and the one behind the last, along frames, rows and columns.
Box = tuple[range, range, range]


def window_size(grid: Extent) -> Extent:
    """Return the size of a window of a grid, in tokens; it may be larger than the grid."""
    frames, height, width = grid
    scale = math.sqrt(_ROWS * _COLUMNS / (height * width))
    sides = (round(height * scale), round(width * scale))
    rows, columns = (max(1, math.ceil(side / count)) for side, count in zip(sides, COUNTS[1:], strict=True))
    return math.ceil(min(frames, _MOST_FRAMES) / COUNTS[0]), rows, columns


def windows_of(grid: Extent, *, is_shifted: bool) -> list[Box]:
    """Return the windows of a grid, which cover each of its tokens once. is_shifted: whether they are moved by half of
    their size, along the axes that have more than one."""
    axes = [
        _parts(length, size, size / 2 if is_shifted and size < length else 0.0)
        for length, size in zip(grid, window_size(grid), strict=True)
    ]
    return list(itertools.product(*axes))  # type: ignore[arg-type]


def _parts(length: int, size: int, shift: float) -> list[range]:
    """Cut an axis at the multiples of `size` less `shift`, which are rounded towards zero."""
    cuts = [int(index * size - shift) for index in range(math.ceil((length + shift) / size) + 1)]
    parts = (range(max(start, 0), min(stop, length)) for start, stop in itertools.pairwise(cuts))
    return [part for part in parts if part]


@dataclass(frozen=True)
class WindowGroup:
    """Windows of one shape. number: of them; shape: in tokens."""

    number: int
    shape: Extent

    @property
    def num_tokens(self) -> int:
        return self.number * math.prod(self.shape)


@dataclass(frozen=True)
class WindowPlan:
    """The order of a grid's tokens by windows. order: [tokens], for each place the token in raster order; back: the
    reverse. groups: one after the other in that order. rotations: [tokens, head_dim / 2], complex, in that order."""

    order: torch.Tensor
    back: torch.Tensor
    groups: tuple[WindowGroup, ...]
    rotations: torch.Tensor

    @property
    def num_windows(self) -> int:
        return sum(group.number for group in self.groups)


def grouped_windows(grid: Extent, *, is_shifted: bool) -> list[tuple[WindowGroup, list[Box]]]:
    """Return the windows of a grid by their shape."""
    by_shape: dict[Extent, list[Box]] = {}
    for box in windows_of(grid, is_shifted=is_shifted):
        frames, rows, columns = map(len, box)
        by_shape.setdefault((frames, rows, columns), []).append(box)
    return [(WindowGroup(len(boxes), shape), boxes) for shape, boxes in by_shape.items()]


def order_of(grid: Extent, groups: list[tuple[WindowGroup, list[Box]]]) -> torch.Tensor:
    """Return the tokens of a grid window by window, int64 [tokens], on the CPU."""
    places = torch.arange(math.prod(grid)).view(grid)

    def tokens() -> Iterator[torch.Tensor]:
        for _, boxes in groups:
            for frames, rows, columns in boxes:
                box = places[frames.start : frames.stop, rows.start : rows.stop, columns.start : columns.stop]
                yield box.flatten()

    return torch.cat(list(tokens()))
