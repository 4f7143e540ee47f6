"""Judges the motion of an object in a stream: commands that rest at the margin, bounces, circles.

A track is where an object is in consecutive frames. Lengths are in half-sides (the frame spans -1 to 1), speeds in
half-sides per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import MOTION_DIRECTIONS, MOTION_NAMES
from diffusion_runtime.quality.shapes.segmentation import CELL_SIZE, WORK_SIZE, Region, Segmentation

MIN_SPEED = 0.012
"""0.44 of the slowest speed in the data."""
MAX_REST = 0.14
"""How far an object that stands still may move, and one that moves along a line across it."""
MAX_BACK = 0.06
"""How far an object that was told to go one way may come back."""
MARGIN = 0.3
"""Distance of an object's edge from the frame's within which it may rest or turn: shapes differ in how far they reach
below their centre."""
MAX_STEP = 0.15
"""Largest step from one frame to the next: 4.8 times the fastest speed in the data."""
SPEED_TOLERANCE, RADIUS_TOLERANCE = 0.25, 0.20
MIN_BEND, MIN_SWEPT = 0.5, 0.3
"""Of the angle that an object on a circle sweeps about the middle: by how much its velocity turns at least. Below so
many radians, ten frames or fewer, the tremor of a decoder's edges bends a track as much as a circle does."""
MIN_SHARE = 0.9
"""Share of frames that must agree."""
MIN_FREE_FRAMES = 6
"""Frames away from the margins that a window of full length must have for a bounce to be read."""


@dataclass(frozen=True)
class Sighting:
    """One object in one frame."""

    frame: int
    colour: int
    cells: float
    """Area, in cells of the checker's grid."""
    x: float
    y: float
    edges: tuple[float, float, float, float]
    """Its left, right, upper and lower edge."""


def sightings(segmentation: Segmentation, first_frame: int) -> list[Sighting]:
    """Every object of a piece of a stream, frames counted from `first_frame`."""
    found = []
    for region in segmentation.regions:
        own = segmentation.labels[region.frame, region.plane] == region.label
        across, down = (torch.nonzero(own.any(dim=axis)).flatten() for axis in (0, 1))
        edges = (
            2 * int(across[0]) / CELL_SIZE - 1,
            2 * (int(across[-1]) + 1) / CELL_SIZE - 1,
            2 * int(down[0]) / CELL_SIZE - 1,
            2 * (int(down[-1]) + 1) / CELL_SIZE - 1,
        )
        x, y, cells = _soft_place(segmentation, region, own)
        found.append(Sighting(first_frame + region.frame, region.colour, cells, x, y, edges))
    return found


def _soft_place(segmentation: Segmentation, region: Region, own: Tensor) -> tuple[float, float, float]:
    """Centroid and area of one region by the share of each pixel that it covers. Cells are too coarse: all edges of a
    square pass from cell to cell at once, and its speed would seem to jump by a third."""
    near = F.max_pool2d(own.float()[None, None], 3, stride=1, padding=1)
    scale = WORK_SIZE // CELL_SIZE
    near = F.interpolate(near, scale_factor=scale, mode="nearest")[0, 0]
    weight = segmentation.coverage[region.frame] * near * (segmentation.colour[region.frame] == region.colour)
    axis = (torch.arange(WORK_SIZE, device=weight.device) + 0.5) * (2.0 / WORK_SIZE) - 1.0
    total = weight.sum()
    return (
        float((weight.sum(0) * axis).sum() / total),
        float((weight.sum(1) * axis).sum() / total),
        float(total) / scale**2,
    )


def as_regions(found: Sequence[Sighting], first_frame: int) -> tuple[Region, ...]:
    """As `link_tracks` takes them; `label` is the index of the sighting."""
    return tuple(
        Region(each.frame - first_frame, each.colour, round(each.cells), each.x, each.y, 0, index)
        for index, each in enumerate(found)
    )


def is_continuous(track: Sequence[Sighting]) -> bool:
    """Whether the object never jumps."""
    return all(
        ((now.x - last.x) ** 2 + (now.y - last.y) ** 2) ** 0.5 <= MAX_STEP * (now.frame - last.frame)
        for last, now in pairwise(track)
    )


def moves_as(name: str | None, track: Sequence[Sighting], *, short: bool = False) -> bool:
    """Whether a track of a stream moves as STREAM_MOTION_NAMES says; None is free.

    short: a few frames, in which a bounce may be at the margin all the time, and cannot be refuted there.
    """
    if name is None:
        return True
    if len(track) < 7:
        return False
    place = torch.tensor([(each.x, each.y) for each in track])
    if name == "still":
        return bool(((place.amax(0) - place.amin(0)) <= MAX_REST).all())
    # Over five frames: a decoder's edges tremble.
    velocity = (place[4:] - place[:-4]) / 4
    if name == "around":
        return _circles(place, velocity)
    edges = torch.tensor([each.edges for each in track])
    axis = 0 if name in ("left", "right", "back and forth") else 1
    sideways = place[:, 1 - axis]
    if float(sideways.max() - sideways.min()) > MAX_REST:
        return False
    room = torch.stack([1 + edges[:, 2 * axis], 1 - edges[:, 2 * axis + 1]], dim=1)[2:-2]
    along = velocity[:, axis]
    if name in MOTION_NAMES:
        sign = MOTION_DIRECTIONS[MOTION_NAMES.index(name)][axis]
        position = sign * place[:, axis]
        came_back = float((torch.cummax(position, 0).values - position).max())
        resting = room[:, 0 if sign < 0 else 1] <= MARGIN
        going = (sign * along >= MIN_SPEED) | resting
        return came_back <= MAX_BACK and float(going.float().mean()) >= MIN_SHARE
    return _bounces(along, (room > MARGIN).all(dim=1), short)


def _bounces(along: Tensor, free: Tensor, short: bool) -> bool:
    """One speed, and turns at the margins alone. free: frames away from the margins."""
    if int(free.sum()) < (2 if short else MIN_FREE_FRAMES):
        return short
    speed = along[free].abs()
    median = float(speed.median())
    steady = ((speed - median).abs() <= SPEED_TOLERANCE * median).float().mean()
    turned = (along[1:].sign() != along[:-1].sign()) & free[1:] & free[:-1]
    return median >= MIN_SPEED and float(steady) >= MIN_SHARE and not bool(turned.any())


def _circles(place: Tensor, velocity: Tensor) -> bool:
    """One radius about the frame's middle, one sense, whichever, and a way that bends: a straight one that passes the
    middle at a distance has nearly one radius as well."""
    radius = torch.linalg.vector_norm(place, dim=1)
    median = float(radius.median())
    steady = ((radius - median).abs() <= RADIUS_TOLERANCE * median).float().mean()
    middle = place[2:-2]
    spin = middle[:, 0] * velocity[:, 1] - middle[:, 1] * velocity[:, 0]
    one_sense = max(float((spin > 0).float().mean()), float((spin < 0).float().mean()))
    speed = float(torch.linalg.vector_norm(velocity, dim=1).median())
    swept = abs(_swept(middle))
    bends = swept < MIN_SWEPT or abs(_swept(velocity)) >= MIN_BEND * swept
    return speed >= MIN_SPEED and float(steady) >= MIN_SHARE and one_sense >= MIN_SHARE and bends


def _swept(vectors: Tensor) -> float:
    """The angle that vectors [frames, 2] turn by from the first to the last, in radians."""
    angle = torch.atan2(vectors[:, 1], vectors[:, 0]).diff()
    return float(torch.remainder(angle + torch.pi, 2 * torch.pi).sum()) - len(angle) * torch.pi
