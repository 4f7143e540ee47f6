"""Attributes of the `emoji` data: scenes, times of day, motions, sizes, places, and what is held out of training.

Attributes are stored as indices into the tuples below and of THINGS; names appear in captions and in reports only.
"""

from __future__ import annotations

from dataclasses import dataclass

SCENE_NAMES: tuple[str, ...] = ("grass", "sea", "snow", "street", "desert", "forest", "sky", "space")
GROUNDED: tuple[bool, ...] = (True, False, True, True, True, True, False, False)
"""Scenes in which things stand on a ground; elsewhere they float."""
TIME_NAMES: tuple[str, ...] = ("day", "sunset", "night")
MOTION_NAMES: tuple[str, ...] = ("still", "left", "right", "up", "down", "bouncing", "spinning", "growing")
MOTION_DIRECTIONS: tuple[tuple[float, float], ...] = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (0, 0), (0, 0), (0, 0))
"""Unit (x, y) per motion; x grows to the right, y grows downwards as rows do."""
SIZE_NAMES: tuple[str, ...] = ("small", "normal", "big")
PLACE_NAMES: tuple[str, ...] = ("middle", "left", "right", "top", "bottom")


@dataclass(frozen=True)
class ObjectAttributes:
    """Attributes of one thing in a caption or a clip; None means not mentioned, or not readable."""

    thing: str | None
    motion: str | None
    size: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class SceneAttributes:
    """Attributes of a whole scene in a caption or a clip; the order of the things carries no meaning."""

    objects: tuple[ObjectAttributes, ...]
    scene: str | None
    time: str | None = None
    """None for the scene `space`, which has no time of day."""


def held_out_motion(thing: int, scene: int) -> int:
    """Return the one motion that a thing never has in a scene in training: an eighth of all combinations.

    Every pair of thing, scene and motion occurs in training; only the triple is new.
    """
    return (thing + 3 * scene + 1) % len(MOTION_NAMES)
