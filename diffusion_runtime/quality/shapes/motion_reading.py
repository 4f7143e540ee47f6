"""Links regions into tracks over the frames, and classifies the motion of a track."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

from diffusion_runtime.quality.shapes.attributes import MOTION_DIRECTIONS, MOTION_NAMES
from diffusion_runtime.quality.shapes.segmentation import Region

MIN_TRAVEL = 0.36
"""Half-sides over the whole clip that count as moving: a little over half of the shortest travel in the data."""
MAX_REST = 0.14
"""Half-sides within which an object that stands still may move."""
MAX_SIDEWAYS = 0.3
"""Largest travel across the direction of motion, as a share of the travel along it."""
MIN_STEADY_FRAMES = 0.9
"""Share of frames that must show the same number of objects."""
_MAX_TRACKS = 4
_COLOUR_CHANGE_COST = 10.0


def link_tracks(regions: tuple[Region, ...], num_frames: int) -> list[list[Region]] | None:
    """Return a list of regions per object, in order of frames; None if the number of objects changes."""
    by_frame: list[list[Region]] = [[] for _ in range(num_frames)]
    for region in regions:
        by_frame[region.frame].append(region)
    count, steady = Counter(len(found) for found in by_frame).most_common(1)[0]
    if steady < MIN_STEADY_FRAMES * num_frames or count > _MAX_TRACKS:
        return None
    if count == 0:
        return []
    kept = [found for found in by_frame if len(found) == count]
    tracks = [[region] for region in kept[0]]
    for found in kept[1:]:
        order = min(permutations(range(count)), key=lambda choice: _cost(tracks, found, choice))
        for track, index in zip(tracks, order, strict=True):
            track.append(found[index])
    return tracks


def _cost(tracks: list[list[Region]], found: list[Region], choice: tuple[int, ...]) -> float:
    total = 0.0
    for track, index in zip(tracks, choice, strict=True):
        last, region = track[-1], found[index]
        total += (last.x - region.x) ** 2 + (last.y - region.y) ** 2
        total += _COLOUR_CHANGE_COST * (last.colour != region.colour)
    return total


def read_motion(track: list[Region]) -> str | None:
    """Read the motion of a track of two frames or more; None where it is too short, slanted, or goes back and forth."""
    xs, ys = [region.x for region in track], [region.y for region in track]
    if max(xs) - min(xs) <= MAX_REST and max(ys) - min(ys) <= MAX_REST:
        return "still"
    travel = (xs[-1] - xs[0], ys[-1] - ys[0])
    for name, (along_x, along_y) in zip(MOTION_NAMES, MOTION_DIRECTIONS, strict=True):
        forward = travel[0] * along_x + travel[1] * along_y
        positions = [region.x * along_x + region.y * along_y for region in track]
        sideways = [region.x * along_y + region.y * along_x for region in track]
        if forward < MIN_TRAVEL or max(sideways) - min(sideways) > MAX_SIDEWAYS * forward:
            continue
        quarters = [positions[round(step * (len(track) - 1) / 4)] for step in range(5)]
        if all(later > earlier for earlier, later in pairwise(quarters)):
            return name
    return None
