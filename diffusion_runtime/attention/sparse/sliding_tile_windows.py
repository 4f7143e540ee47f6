"""The window rule of sliding tile attention, and the key tiles it lists (Zhang et al., arXiv:2502.04507).

Along an axis of n tiles a window of w tiles reaches h = w // 2 tiles to both sides of its centre, and the centre is the
query's tile moved inwards until the window lies on the axis. So every query tile sees min(2 h + 1, n) tiles, its own
among them: borders shift a window and never shrink it, and an even w is the next odd one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.errors import shown


@dataclass(frozen=True)
class WindowSelection:
    """Key tiles of R windows. kv_count: int32 [R, tiles]; kv_index: int32 [R, tiles, capacity], ascending.

    is_full: every window holds the whole grid.
    """

    kv_count: torch.Tensor
    kv_index: torch.Tensor
    is_full: bool


def checked_extent(value: Any, what: str) -> Extent:
    """Three whole numbers of 1 or more as a tuple. Raises ValueError that names `what`."""
    items = tuple(value) if isinstance(value, list | tuple) else ()
    whole = all(isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in items)
    if len(items) != 3 or not whole:
        raise ValueError(
            f"{what}: expected three whole numbers of 1 or more (frames, height, width), got {shown(value)}"
        )
    return items[0], items[1], items[2]


def attended_tiles(num_tiles: Extent, window: Extent) -> Extent:
    """Return how many tiles every query tile sees along each axis; windows with equal results are the same window."""
    frames, height, width = (min(2 * (w // 2) + 1, n) for n, w in zip(num_tiles, window, strict=True))
    return frames, height, width


def default_candidates(num_tiles: Extent) -> tuple[Extent, ...]:
    """The windows that a search tries when none is named: one tile thick along each axis in turn, and two boxes.

    On the paper's 5 x 6 x 10 tiles these are its five candidates for HunyuanVideo. Windows that hold the whole grid are
    left out, for they would always win; so are equal ones. Empty when the grid has too few tiles.
    """
    frames, height, width = num_tiles
    proposed = (
        (1, height, width),
        (frames, 1, width),
        (frames, height, 1),
        (frames, -(-height // 2), -(-width // 4)),
        (-(-frames // 2), -(-height // 2), -(-width // 2)),
    )
    distinct: dict[Extent, Extent] = {}
    for window in proposed:
        distinct.setdefault(attended_tiles(num_tiles, window), window)
    return tuple(window for attended, window in distinct.items() if attended != num_tiles)


def window_selection(num_tiles: Extent, attended: tuple[Extent, ...], device: torch.device) -> WindowSelection:
    """The key tiles of several windows, each as `attended_tiles` gives it."""
    counts = [math.prod(extent) for extent in attended]
    total = math.prod(num_tiles)
    index = torch.zeros(len(attended), total, max(counts), dtype=torch.int32, device="cpu")
    for row, extent in enumerate(attended):
        index[row, :, : counts[row]] = _listed_tiles(num_tiles, extent)
    count = torch.tensor(counts, dtype=torch.int32, device="cpu")[:, None].repeat(1, total)
    return WindowSelection(count.to(device), index.to(device), is_full=min(counts) == total)


def _listed_tiles(num_tiles: Extent, attended: Extent) -> torch.Tensor:
    """int32 [tiles, prod(attended)]: raster indexes of the tiles each query tile sees, ascending."""
    t, h, w = (_axis_tiles(n, count) for n, count in zip(num_tiles, attended, strict=True))
    rows = t[:, None, None, :, None, None] * num_tiles[1] + h[None, :, None, None, :, None]
    listed = rows * num_tiles[2] + w[None, None, :, None, None, :]
    return listed.reshape(math.prod(num_tiles), math.prod(attended)).to(torch.int32)


def _axis_tiles(num_tiles: int, attended: int) -> torch.Tensor:
    """int64 [num_tiles, attended]: the tiles each tile of one axis sees."""
    first = (torch.arange(num_tiles, device="cpu") - attended // 2).clamp(0, num_tiles - attended)
    return first[:, None] + torch.arange(attended, device="cpu")
