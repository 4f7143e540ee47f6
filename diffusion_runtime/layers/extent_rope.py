"""Rotary positions as parts of an extent: real numbers of seconds and pixels, turned by paces over all heads together.

A position is a part of the longest and widest clip there is, from -1 to 1. Every pair of channels of the whole width
turns at a pace of its own, so that no two heads turn alike (as in LTX-Video, arXiv:2501.00103).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def extent_paces(theta: float, dim: int, num_axes: int, *, is_double: bool) -> torch.Tensor:
    """Radians from the middle of an extent to its end, from a quarter turn to theta quarter turns; float32.

    dim: of all heads, whose channels the axes share in pairs. is_double: whether they are computed in float64.
    """
    dtype = torch.float64 if is_double else torch.float32
    exponents = torch.linspace(0.0, 1.0, dim // (2 * num_axes), dtype=dtype)
    return (torch.pow(theta, exponents) * torch.pi / 2).float()


def turned(positions: torch.Tensor, extent: int, paces: torch.Tensor) -> torch.Tensor:
    """Unit complex numbers [positions, paces], complex64. extent: the position that counts as 1.

    The angles are rounded to float32, as they were in training: at thousands of radians that moves the quickest
    channels, and the weights know them so.
    """
    angles = (positions / extent * 2 - 1)[:, None] * paces
    return torch.complex(angles.cos(), angles.sin())


def by_head(numbers: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """[tokens, pairs] to [tokens, heads, head_dim / 2]. Pairs that the paces do not fill come first and do not turn."""
    still = numbers.new_ones(numbers.shape[0], dim // 2 - numbers.shape[1])
    return torch.cat([still, numbers], dim=1).view(numbers.shape[0], num_heads, -1)


def grid_extent_rotations(
    positions: Sequence[torch.Tensor],
    extents: Sequence[int],
    paces: torch.Tensor,
    num_heads: int,
    dim: int,
    device: torch.device,
) -> torch.Tensor:
    """Unit complex numbers [tokens, heads, head_dim / 2], complex64, of a grid's tokens in raster order.

    positions, extents: of frames, rows and columns. paces: of extent_paces for as many axes. dim: of all heads.
    """
    grid = tuple(len(axis) for axis in positions)
    tables = [turned(axis, extent, paces) for axis, extent in zip(positions, extents, strict=True)]
    whole = torch.stack(
        [
            table.view(*(size if place == axis else 1 for place, size in enumerate(grid)), -1).expand(*grid, -1)
            for axis, table in enumerate(tables)
        ],
        dim=-1,
    )
    return by_head(whole.flatten(3).flatten(0, 2), num_heads, dim).to(device)
