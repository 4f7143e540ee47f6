"""Prompt parser: the attributes that a prompt names, in the closed vocabulary of the embedded model `shapes`.

The inverse of captions.py: words are matched against its tables, the longest phrase first.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.quality.phrases import Meaning, Phrases
from diffusion_runtime.quality.shapes.attributes import ObjectAttributes, SceneAttributes
from diffusion_runtime.quality.shapes.captions import (
    BACKGROUND_WORDS,
    COLOUR_WORDS,
    IMAGE_OPENINGS,
    JOINTS,
    MOTION_WORDS,
    SHAPE_WORDS,
    UNKNOWN_FILLERS,
    VIDEO_OPENINGS,
)

MAX_OBJECTS = 2


def _phrases() -> dict[str, Meaning]:
    """Return phrases with their meanings; the shape `any` is one that is free."""
    found: dict[str, Meaning] = {}
    for kind, table in (
        ("background", BACKGROUND_WORDS),
        ("motion", MOTION_WORDS),
        ("shape", SHAPE_WORDS),
        ("colour", COLOUR_WORDS),
    ):
        for value, phrases in table.items():
            found.update(dict.fromkeys(phrases, (kind, value)))
    for noun in ("shape", "object"):
        found[noun] = ("shape", "any")
    for where in ("of", "in"):
        for word in ("colour", "color"):
            found[f"{where} the same {word}"] = ("relation", "same colour")
    found["both"] = ("relation", "both")
    for text in (*VIDEO_OPENINGS, *IMAGE_OPENINGS):
        found[text.strip()] = ("opening", "")
    for text in ("a", "an", "the", ".", ",", *UNKNOWN_FILLERS):
        found[text] = ("nothing", "")
    for text in JOINTS:
        found[text.strip()] = ("nothing" if text.strip() == "," else "joint", "")
    found[", and"] = ("joint", "")
    return found


VOCABULARY = Phrases(_phrases())


@dataclass
class _Object:
    colour: str | None = None
    shape: str | None = None
    motion: str | None = None


def read_prompt(text: str) -> SceneAttributes | None:
    """Return what the prompt names; an attribute that it leaves out is None. None for a prompt without an object, with
    more than MAX_OBJECTS, or with a word or word order that the captions of the training data do not have."""
    meanings = VOCABULARY.read(text)
    return None if meanings is None else _scene(meanings)


def _scene(meanings: list[Meaning]) -> SceneAttributes | None:
    objects: list[_Object] = []
    background: str | None = None
    colour: str | None = None
    is_both = is_same_colour = False
    for position, (kind, value) in enumerate(meanings):
        if kind == "opening" and position:
            return None
        if kind == "background":
            if background is not None:
                return None
            background = value
        elif kind == "colour":
            if colour is not None:
                return None
            colour = value
        elif kind == "shape":
            objects.append(_Object(colour, None if value == "any" else value))
            colour = None
        elif kind == "relation" and value == "both":
            is_both = True
        elif kind == "relation":
            is_same_colour = True
        elif kind == "motion":
            moved = objects if is_both else objects[-1:]
            if not moved or any(each.motion is not None for each in moved):
                return None
            for each in moved:
                each.motion = value
    if colour is not None or not 1 <= len(objects) <= MAX_OBJECTS or ((is_both or is_same_colour) and len(objects) < 2):
        return None
    if is_same_colour:
        if objects[0].colour is None or objects[1].colour is not None:
            return None
        objects[1].colour = objects[0].colour
    named = tuple(ObjectAttributes(each.colour, each.shape, each.motion) for each in objects)
    return SceneAttributes(named, background)
