"""Prompt parser: the attributes that a prompt names, in the closed vocabulary of the embedded model `emoji`.

The inverse of captions.py: words are matched against its tables, the longest phrase first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from diffusion_runtime.quality.emoji.attributes import ObjectAttributes, SceneAttributes
from diffusion_runtime.quality.emoji.things import THINGS
from diffusion_runtime.quality.emoji.wording import (
    IMAGE_OPENINGS,
    JOINTS,
    MOTIONS,
    OWN_MOTIONS,
    PLACES,
    SCENES,
    SIZES,
    SKY_AT,
    TIMES,
    VIDEO_OPENINGS,
    plural,
)
from diffusion_runtime.quality.phrases import Meaning, Phrases

MAX_OBJECTS = 2
_ARTICLES = ("a", "an", "the", "some", ".")


def _phrases() -> Iterator[tuple[str, Meaning]]:
    """Yield phrases with their meanings; of equal phrases the last one counts."""
    tables: tuple[tuple[str, Mapping[str, Iterable[str]]], ...] = (
        ("motion", MOTIONS),
        *(("motion", table) for table in OWN_MOTIONS.values()),
        ("scene", SCENES),
        ("time", TIMES),
        ("sky", SKY_AT),
        ("place", PLACES),
        ("size", SIZES),
    )
    for kind, table in tables:
        for value, wordings in table.items():
            yield from ((words, (kind, value)) for words in wordings)
    for thing in THINGS:
        for noun in thing.words:
            yield plural(noun), ("things", thing.name)
            yield noun, ("thing", thing.name)
    # The captions have them of the water, and name the sea apart.
    yield from ((f"{verb} out of the sea", ("leap", "up")) for verb in ("jumping", "leaping"))
    yield "two", ("two", "")
    yield from ((text.strip(), ("opening", "")) for text in (*VIDEO_OPENINGS, *IMAGE_OPENINGS))
    yield from ((text.strip(), ("joint", "")) for text in JOINTS)
    yield from ((text, ("nothing", "")) for text in _ARTICLES)


@functools.cache
def vocabulary() -> Phrases:
    """Return every phrase that is read: those of the captions, and a few besides."""
    return Phrases(dict(_phrases()))


@dataclass
class _Object:
    thing: str
    size: str | None
    motion: str | None = None
    place: str | None = None


def read_prompt(text: str) -> SceneAttributes | None:
    """Return what the prompt names; an attribute that it leaves out is None. None for a prompt without a thing, with
    more than MAX_OBJECTS, or with a word or word order that the captions of the training data do not have."""
    meanings = vocabulary().read(text)
    return None if meanings is None else _scene(meanings)


def _parts(meaning: Meaning) -> tuple[Meaning, ...]:
    """Return what a phrase names where it is more than one thing, such as "in the evening sky"."""
    kind, value = meaning
    if kind == "sky":
        return ("scene", "sky"), ("time", value)
    if kind == "leap":
        return ("motion", value), ("scene", "sea")
    return (meaning,)


def _scene(meanings: list[Meaning]) -> SceneAttributes | None:
    objects: list[_Object] = []
    # The things that a motion and a place are said of: both of `two cats`, else the last one.
    group = 1
    found: dict[str, str | None] = {"scene": None, "time": None}
    size: str | None = None
    is_two = False
    for position, (kind, value) in enumerate(part for meaning in meanings for part in _parts(meaning)):
        if kind == "opening" and position:
            return None
        if kind in found:
            if found[kind] is not None:
                return None
            found[kind] = value
        elif kind == "two":
            is_two = True
        elif kind == "size":
            if size is not None:
                return None
            size = value
        elif kind in ("thing", "things"):
            # Some plurals are as the singular, such as sheep.
            if kind == "things" and not is_two:
                return None
            group = 2 if is_two else 1
            objects += [_Object(value, size) for _ in range(group)]
            size, is_two = None, False
        elif kind in ("motion", "place"):
            named_things = objects[-group:]
            if not named_things or any(getattr(each, kind) is not None for each in named_things):
                return None
            for each in named_things:
                setattr(each, kind, value)
    if size is not None or is_two or not 1 <= len(objects) <= MAX_OBJECTS:
        return None
    described = tuple(ObjectAttributes(each.thing, each.motion, each.size, each.place) for each in objects)
    return SceneAttributes(described, found["scene"], found["time"])
