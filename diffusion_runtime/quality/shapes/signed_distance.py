"""Signed distances of the five shapes, and the pixel coverage that follows from them.

All shapes stand upright and are sized so that they look equally large at one radius. Circle, ring and square are exact;
triangle and star follow the polygon folds of Inigo Quilez, "2D distance functions" (iquilezles.org).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BOUNDING_RADIUS = 1.22
"""No shape reaches further than this many radii from its centre."""

_SQUARE_HALF_SIDE = 0.86
_TRIANGLE_CIRCUMRADIUS = 1.2
_STAR_OUTER_RADIUS = 1.2
_STAR_INNER_FRACTION = 0.46
_RING_INNER_FRACTION = 0.54


def _circle(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    return torch.sqrt(x * x + y * y) - radius


def _ring(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    middle, half_width = radius * (1 + _RING_INNER_FRACTION) / 2, radius * (1 - _RING_INNER_FRACTION) / 2
    return (torch.sqrt(x * x + y * y) - middle).abs() - half_width


def _square(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    half_side = _SQUARE_HALF_SIDE * radius
    over_x, over_y = x.abs() - half_side, y.abs() - half_side
    outside = torch.sqrt(over_x.clamp(min=0) ** 2 + over_y.clamp(min=0) ** 2)
    return outside + torch.maximum(over_x, over_y).clamp(max=0)


def _triangle(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    root = math.sqrt(3.0)
    half_side = radius * _TRIANGLE_CIRCUMRADIUS * root / 2
    x, y = x.abs() - half_side, -y + half_side / root
    fold = x + root * y > 0
    x, y = torch.where(fold, (x - root * y) / 2, x), torch.where(fold, (-root * x - y) / 2, y)
    x = x - torch.minimum(torch.maximum(x, -2 * half_side), torch.zeros_like(x))
    return -torch.sqrt(x * x + y * y) * torch.sign(y)


def _star(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    outer = radius * _STAR_OUTER_RADIUS
    cos36, sin36 = math.cos(math.pi / 5), math.sin(math.pi / 5)
    x, y = x.abs(), -y
    for sign in (1.0, -1.0):
        along = (sign * cos36 * x - sin36 * y).clamp(min=0)
        x, y = x - 2 * along * sign * cos36, y + 2 * along * sin36
    x, y = x.abs(), y - outer
    edge_x, edge_y = _STAR_INNER_FRACTION * sin36, _STAR_INNER_FRACTION * cos36 - 1
    share = (x * edge_x + y * edge_y) / (edge_x * edge_x + edge_y * edge_y)
    share = torch.minimum(share.clamp(min=0), outer)
    away_x, away_y = x - edge_x * share, y - edge_y * share
    return torch.sqrt(away_x * away_x + away_y * away_y) * torch.sign(y * edge_x - x * edge_y)


_SIGNED_DISTANCES = (_circle, _square, _triangle, _star, _ring)


def coverage(shape: Tensor, x: Tensor, y: Tensor, radius: Tensor, pixel: float) -> Tensor:
    """Share of each pixel inside the shape, 0 to 1, of the broadcast shape of all arguments.

    `shape` int64 index into SHAPE_NAMES; `x`, `y` pixel centres relative to the shape's centre; `radius` and `pixel`
    (the side of a pixel) in the same unit. Upright means: y grows downwards, triangle and star point up.
    """
    distance = _SIGNED_DISTANCES[0](x, y, radius)
    for index in range(1, len(_SIGNED_DISTANCES)):
        distance = torch.where(shape == index, _SIGNED_DISTANCES[index](x, y, radius), distance)
    return (0.5 - distance / pixel).clamp(0.0, 1.0)
