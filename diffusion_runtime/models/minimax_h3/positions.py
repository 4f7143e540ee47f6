"""MiniMax-H3's rotary positions: time, row and column of every token of the packed sequence, as real numbers.

The text ends at time 0. A latent of the sound takes 1, a frame of the video 5/3, the same at 24 frames and 40 latents
a second. A token of the text takes 1, and the text ends where the clip begins, or where its references do: these follow
each other, an image taking 1, and the clip begins behind the last. Rows and columns are parts of the square
root of the area, around the middle, so that pictures of every shape have the same density.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Time of a frame; frames of the latents of a chunk; extent of a square picture.
_FRAME = 5.0 / 3.0
_FRAMES_OF_LATENTS = (1, 4, 4, 4, 4)
_EXTENT = 32.0


@dataclass(frozen=True)
class ReferenceGrid:
    """A reference in tokens. pictures: latent frames, rows and columns, None for a sound; num_moments: of its sound."""

    pictures: tuple[int, int, int] | None
    num_moments: int = 0


def reference_positions(
    references: Iterable[ReferenceGrid], height: int, width: int
) -> tuple[list[torch.Tensor], float]:
    """Return [tokens, 3], float64, of each part of references, and the time at which the clip begins behind them. The
    sound of a reference comes before its pictures and begins with them. height, width: tokens of the clip, at whose
    sides a sound without pictures is."""
    found, now = [], 0.0
    for each in references:
        frames, *sides = each.pictures or (0, height, width)
        if each.num_moments:
            found.append(sound_positions(each.num_moments, sides[0], sides[1], now))
        if frames:
            found.append(grid_positions(now + frame_times(frames), sides[0], sides[1]))
        length = float(_ends(frames)[-1]) if frames > 1 else float(frames)
        now += max(length, each.num_moments)
    return found, now


def frame_times(num_frames: int) -> torch.Tensor:
    """Return the time at which each latent frame begins, [frames], float64."""
    return _ends(num_frames) - _spans(num_frames)


def last_time(num_frames: int) -> float:
    """Return the time of an image to end with: that of the last frame of a clip of so many latent frames."""
    return float(_ends(num_frames)[-1]) - _FRAME


def grid_positions(times: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return [tokens, 3], float64, of a grid of height x width tokens at each of these times, in raster order."""
    rows, columns = _side(height, width), _side(width, height)
    return torch.cartesian_prod(times.double(), rows, columns).view(-1, 3)


def sound_positions(length: int, height: int, width: int, start: float = 0.0) -> torch.Tensor:
    """Return [2 * length, 3], float64, of the sound of a clip of height x width tokens that begins at time `start`: the
    left side's moments, at the first column, and the right side's, at the last."""
    columns = _side(width, height)
    sides = torch.stack([columns[0], columns[-1]])
    moments = torch.cartesian_prod(sides, start + torch.arange(length, dtype=torch.float64))
    return torch.stack([moments[:, 1], torch.zeros(len(moments), dtype=torch.float64), moments[:, 0]], dim=1)


def text_positions(num_tokens: int, length: int) -> torch.Tensor:
    """Return [num_tokens, 3], float64, of a text of so many tokens, padding behind it included."""
    times = torch.arange(num_tokens, dtype=torch.float64) - length
    return torch.nn.functional.pad(times[:, None], (0, 2))


def rotations_of(positions: torch.Tensor, num_paces: int, head_dim: int, theta: float) -> torch.Tensor:
    """Return unit complex numbers [tokens, head_dim / 2], complex64, which turn num_paces pairs of channels along each
    axis and leave the others. positions: [tokens, axes]."""
    paces = theta ** (-torch.arange(num_paces, dtype=torch.float64) / num_paces)
    angles = (positions[:, :, None] * paces).flatten(1)
    angles = torch.nn.functional.pad(angles, (0, head_dim // 2 - angles.shape[1]))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def grid_rotations(
    times: torch.Tensor, height: int, width: int, num_paces: int, head_dim: int, theta: float, device: torch.device
) -> torch.Tensor:
    """Return `rotations_of` of `grid_positions`, to the bit, on a device. An axis has one table: of a clip of 5 seconds
    103 places are turned in place of 3 x 37,296, which takes a core 0.2 s before the first step."""
    axes = times.double(), _side(height, width), _side(width, height)
    tables = [rotations_of(axis[:, None], num_paces, 2 * num_paces, theta).to(device) for axis in axes]
    grid = tuple(len(axis) for axis in axes)
    parts = [
        table.view(*(size if place == axis else 1 for place, size in enumerate(grid)), -1).expand(*grid, -1)
        for axis, table in enumerate(tables)
    ]
    still = tables[0].new_ones(()).expand(*grid, head_dim // 2 - len(axes) * num_paces)
    return torch.cat([*parts, still], dim=-1).flatten(0, 2)


def _spans(num_frames: int) -> torch.Tensor:
    pattern = torch.tensor(_FRAMES_OF_LATENTS, dtype=torch.float64) * _FRAME
    return pattern.repeat(-(-num_frames // len(pattern)))[:num_frames]


def _ends(num_frames: int) -> torch.Tensor:
    return _spans(num_frames).cumsum(0)


def _side(size: int, other: int) -> torch.Tensor:
    """Return the positions along a side of `size` tokens, whose other side has `other`."""
    share: float = size / (size * other) ** 0.5
    return (torch.arange(size, dtype=torch.float64) * share / size + (1 - share) / 2) * _EXTENT
