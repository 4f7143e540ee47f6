"""Captions of scenes in many wordings, and the attributes each caption mentions: one left out is free, and None
there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from diffusion_runtime.quality.emoji.attributes import ObjectAttributes, SceneAttributes
from diffusion_runtime.quality.emoji.things import THING_NAMES, THINGS
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
    UNCOUNTED,
    VIDEO_OPENINGS,
    article,
    plural,
)

_OF = {thing.name: thing for thing in THINGS}


@dataclass(frozen=True)
class CaptionSettings:
    """Settings of captions: how much they omit and how far they stray from the plainest wording; shares are 0 to 1."""

    plain_wording: float = 0.4
    """Share of phrases in the first wording listed."""
    own_wording: float = 0.5
    """Share of motions in words of the thing's own kind ("a car driving left"), where it has some."""
    foreign_wording: float = 0.06
    """Share of motions in words of another kind ("a pizza flying up")."""
    omit_motion: float = 0.05
    omit_still: float = 0.5
    """Share of things at rest of which it is not said: so a thing without a motion mostly rests."""
    omit_size: float = 0.25
    """Share of small and big things whose size is left out."""
    omit_place: float = 0.5
    omit_scene: float = 0.08
    omit_day: float = 0.75
    """Share of days left out: so a scene without a time is mostly by day."""
    omit_other_time: float = 0.08
    synonym: float = 0.2
    """Share of things called by another of their names."""
    opening: float = 0.1
    """Share of captions that begin with "a video of" or the like."""
    scene_first: float = 0.08
    """Share of captions that begin with the scene."""


EVALUATION_CAPTIONS = CaptionSettings(
    omit_motion=0.0, omit_still=0.0, omit_scene=0.0, omit_day=0.5, foreign_wording=0.0
)
"""Thing, motion and scene are always mentioned; size and place in a part of the captions."""


@dataclass(frozen=True)
class Caption:
    """A text and the attributes it mentions."""

    text: str
    attributes: SceneAttributes
    spans: tuple[tuple[int, int], ...]
    """Per thing: first character of its words in `text`, and one past the last; equal things share theirs."""


def write_caption(
    scene: SceneAttributes, random: Random, settings: CaptionSettings = CaptionSettings(), *, image: bool = False
) -> Caption:
    """Write a caption of a scene with every attribute; `image` words it for one frame, mostly without motion."""
    if image:
        settings = replace(settings, omit_motion=max(settings.omit_motion, 0.8), omit_still=0.8)
    mentioned = tuple(_leave_out(one, random, settings) for one in scene.objects)
    if len(mentioned) == 2 and random.random() < 0.5:
        mentioned = (mentioned[1], mentioned[0])
    where, scene_name, time = _setting(scene, random, settings)
    phrases, joint, mentioned = _phrases(mentioned, scene_name, random, settings)
    opening = ""
    if random.random() < settings.opening:
        opening = random.choice(IMAGE_OPENINGS if image else VIDEO_OPENINGS)
    if where and not opening and random.random() < settings.scene_first:
        opening, where = f"{where}, ", ""
    elif where:
        # After two things the scene is set apart by a comma, else it would be the second one's alone.
        where = (", " if len(phrases) == 2 and random.random() < 0.6 else " ") + where
    spans, at = [], len(opening)
    for phrase in phrases:
        spans.append((at, at + len(phrase)))
        at += len(phrase) + len(joint)
    if len(phrases) < len(mentioned):
        spans *= 2
    return Caption(opening + joint.join(phrases) + where, SceneAttributes(mentioned, scene_name, time), tuple(spans))


def _phrase(words: tuple[str, ...], random: Random, settings: CaptionSettings) -> str:
    return words[0] if random.random() < settings.plain_wording else random.choice(words)


def _leave_out(one: ObjectAttributes, random: Random, settings: CaptionSettings) -> ObjectAttributes:
    omit_motion = settings.omit_still if one.motion == "still" else settings.omit_motion
    motion = None if random.random() < omit_motion else one.motion
    size = None if one.size == "normal" or random.random() < settings.omit_size else one.size
    place = None if one.place == "middle" or random.random() < settings.omit_place else one.place
    return ObjectAttributes(one.thing, motion, size, place)


def _setting(scene: SceneAttributes, random: Random, settings: CaptionSettings) -> tuple[str, str | None, str | None]:
    """Words of scene and time, and the two as far as they are mentioned."""
    name = None if random.random() < settings.omit_scene else scene.scene
    omit = settings.omit_day if scene.time == "day" else settings.omit_other_time
    time = None if scene.time is None or random.random() < omit else scene.time
    if name == "sky" and time is not None and random.random() < 0.6:
        return random.choice(SKY_AT[time]), name, time
    words = [_phrase(SCENES[name], random, settings)] if name is not None else []
    if time is not None:
        words.append(_phrase(TIMES[time], random, settings))
    return " ".join(words), name, time


def _phrases(
    mentioned: tuple[ObjectAttributes, ...], scene: str | None, random: Random, settings: CaptionSettings
) -> tuple[list[str], str, tuple[ObjectAttributes, ...]]:
    """Words of each thing, or of both together ("two cats jumping"), what stands between, and what is said."""
    if len(mentioned) == 2 and mentioned[0].thing == mentioned[1].thing:
        together = _together(mentioned, scene, random, settings)
        if together is not None:
            return together
    joint = JOINTS[0] if random.random() < settings.plain_wording else random.choice(JOINTS)
    return [_one(each, scene, random, settings) for each in mentioned], joint, mentioned


def _together(
    mentioned: tuple[ObjectAttributes, ...], scene: str | None, random: Random, settings: CaptionSettings
) -> tuple[list[str], str, tuple[ObjectAttributes, ...]] | None:
    first, second = mentioned
    noun = _noun(str(first.thing), random, settings)
    # Both motions are equal where things are; one may have been left out.
    if noun in UNCOUNTED or first.motion != second.motion or random.random() < 0.15:
        return None
    size = first.size if first.size == second.size else None
    words = ["two", *([_phrase(SIZES[size], random, settings)] if size else []), plural(noun)]
    if first.motion is not None:
        words.append(_motion(str(first.thing), first.motion, scene, random, settings, many=True))
    both = ObjectAttributes(first.thing, first.motion, size, None)
    return [" ".join(words)], " and ", (both, both)


def _noun(thing: str, random: Random, settings: CaptionSettings) -> str:
    return random.choice(_OF[thing].words) if random.random() < settings.synonym else thing


def _one(one: ObjectAttributes, scene: str | None, random: Random, settings: CaptionSettings) -> str:
    thing = str(one.thing)
    noun = _noun(thing, random, settings)
    words = f"{_phrase(SIZES[one.size], random, settings)} {noun}" if one.size is not None else noun
    style = random.random()
    if style < 0.06:
        text = words
    elif style < 0.12:
        text = f"the {words}"
    elif noun in UNCOUNTED:
        text = f"some {words}" if style < 0.5 else words
    else:
        text = f"{article(words)} {words}"
    parts = [text]
    if one.motion is not None:
        parts.append(_motion(thing, one.motion, scene, random, settings))
    if one.place is not None:
        # "on the left" stands after the noun or after the motion.
        parts.insert(1 if random.random() < 0.5 else len(parts), _phrase(PLACES[one.place], random, settings))
    return " ".join(parts)


def _motion(
    thing: str, motion: str, scene: str | None, random: Random, settings: CaptionSettings, *, many: bool = False
) -> str:
    """Words of a motion that suit a thing; `many` leaves out verbs in the singular."""
    own = OWN_MOTIONS[_OF[thing].kind].get(motion, ())
    if scene != "sea":
        own = tuple(words for words in own if "water" not in words)
    chance = random.random()
    if chance < settings.foreign_wording:
        others = [words for table in OWN_MOTIONS.values() for words in table.get(motion, ()) if "water" not in words]
        words = random.choice(others or list(MOTIONS[motion]))
    elif own and chance < settings.foreign_wording + settings.own_wording:
        words = _phrase(own, random, settings)
    else:
        words = _phrase(MOTIONS[motion], random, settings)
    verb = words.split()[0]
    return MOTIONS[motion][0] if many and not verb.endswith("ing") and verb != "motionless" else words


def all_words() -> list[str]:
    """Return every word (and mark) of the captions, lower case, sorted: the vocabulary of the tokenizer."""
    tables = (MOTIONS, SCENES, TIMES, SKY_AT, PLACES, SIZES, *OWN_MOTIONS.values())
    phrases = [phrase for table in tables for words in table.values() for phrase in words]
    phrases += [*VIDEO_OPENINGS, *IMAGE_OPENINGS, *JOINTS, "a an the some two . , ; : both"]
    for name in THING_NAMES:
        for noun in _OF[name].words:
            phrases += [noun, plural(noun)]
    words = {word for phrase in phrases for word in phrase.replace(",", " , ").replace(";", " ; ").split()}
    return sorted(words)
