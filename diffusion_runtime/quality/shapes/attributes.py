"""The closed vocabulary of the `shapes` data: colours, shapes, motions, backgrounds, and the combinations held out of
training.

Attributes are stored as indices into the tuples below; names appear in captions and in reports only.
"""

from __future__ import annotations

from dataclasses import dataclass

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (226, 30, 36),
    "orange": (250, 120, 12),
    "yellow": (250, 230, 40),
    "green": (28, 166, 52),
    "cyan": (36, 214, 230),
    "blue": (34, 62, 224),
    "purple": (134, 40, 192),
    "pink": (255, 104, 196),
}
"""sRGB values, 0 to 255. Every entry is saturated (largest minus smallest channel over half the range); every
background tone is nearly grey."""

COLOUR_NAMES: tuple[str, ...] = tuple(COLOURS)
SHAPE_NAMES: tuple[str, ...] = ("circle", "square", "triangle", "star", "ring")
MOTION_NAMES: tuple[str, ...] = ("left", "right", "up", "down", "still")
ENDLESS_MOTION_NAMES: tuple[str, ...] = ("back and forth", "up and down", "around")
"""Motions of streams alone: a horizontal and a vertical bounce between the margins, and a circle about the middle."""
STREAM_MOTION_NAMES: tuple[str, ...] = MOTION_NAMES + ENDLESS_MOTION_NAMES
"""Every motion of a stream; `left` to `down` there last until the margin, where the object rests."""
BACKGROUND_NAMES: tuple[str, ...] = ("plain", "stripes", "checker", "gradient")

MOTION_DIRECTIONS: tuple[tuple[float, float], ...] = ((-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0), (0.0, 0.0))
"""Unit (x, y) per motion; x grows to the right, y grows downwards as rows do."""


@dataclass(frozen=True)
class ObjectAttributes:
    """Attributes of one object in a caption or a clip; None means not mentioned, or not readable."""

    colour: str | None
    shape: str | None
    motion: str | None


@dataclass(frozen=True)
class SceneAttributes:
    """Attributes of a whole scene in a caption or a clip; the order of the objects carries no meaning."""

    objects: tuple[ObjectAttributes, ...]
    background: str | None


def is_held_out(colour_index: int, shape_index: int, motion_index: int) -> bool:
    """Return True if this (colour, shape, motion) never appears in training: 25 of the 200 combinations.

    The rule spreads them evenly: a colour loses three or four of its 25 combinations, a shape and a motion five of 40,
    and a pair of two attributes at most one value of the third. Every pair therefore occurs in training; only the
    triple is new.
    """
    return (colour_index + shape_index + 3 * motion_index) % 8 == 5


HELD_OUT_COMBINATIONS: tuple[tuple[int, int, int], ...] = tuple(
    (colour, shape, motion)
    for colour in range(len(COLOUR_NAMES))
    for shape in range(len(SHAPE_NAMES))
    for motion in range(len(MOTION_NAMES))
    if is_held_out(colour, shape, motion)
)
