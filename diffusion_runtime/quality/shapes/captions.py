"""Captions of scenes in many wordings, and the attributes each caption mentions: one left out is free, and None
there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from diffusion_runtime.quality.shapes.attributes import ObjectAttributes, SceneAttributes

COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red",),
    "orange": ("orange",),
    "yellow": ("yellow",),
    "green": ("green",),
    "cyan": ("cyan", "turquoise"),
    "blue": ("blue",),
    "purple": ("purple", "violet"),
    "pink": ("pink", "magenta"),
}
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc", "disk", "ball"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "ring": ("ring", "hoop", "donut", "doughnut"),
}
MOTION_WORDS: dict[str, tuple[str, ...]] = {
    **{
        side: (
            f"moving {side}",
            f"moving to the {side}",
            f"going {side}",
            f"moves {side}",
            f"moves to the {side}",
            f"sliding {side}",
            f"sliding to the {side}",
            f"drifting {side}",
            f"heading {side}",
            f"traveling {side}",
            f"travelling {side}",
            f"moving {side}wards",
            f"goes {side}",
        )
        for side in ("left", "right", "up", "down")
    },
    "still": (
        "standing still",
        "not moving",
        "staying still",
        "that does not move",
        "at rest",
        "staying in place",
        "holding still",
        "motionless",
    ),
}
MOTION_WORDS["up"] = (*(words for words in MOTION_WORDS["up"] if "to the" not in words), "rising", "moving upward")
MOTION_WORDS["down"] = (*(w for w in MOTION_WORDS["down"] if "to the" not in w), "falling", "moving downward")
_ENDLESS_MOTION_WORDS: dict[str, tuple[str, ...]] = {
    "back and forth": (
        "moving back and forth",
        "going back and forth",
        "moves back and forth",
        "bouncing left and right",
        "moving from side to side",
        "goes from side to side",
        "bouncing from side to side",
    ),
    "up and down": (
        "moving up and down",
        "going up and down",
        "moves up and down",
        "bouncing up and down",
        "bouncing",
    ),
    "around": (
        "moving around",
        "going around",
        "moves in a circle",
        "moving in a circle",
        "going in circles",
        "circling",
        "orbiting",
    ),
}
_EVERY_MOTION_WORDS = {**MOTION_WORDS, **_ENDLESS_MOTION_WORDS}
BACKGROUND_WORDS: dict[str, tuple[str, ...]] = {
    "plain": ("on a plain background", "on a solid background", "over a plain background", "plain background"),
    "stripes": ("on a striped background", "over stripes", "in front of stripes", "on a background of stripes"),
    "checker": (
        "on a checkered background",
        "on a chequered background",
        "over a checkerboard",
        "on a checkerboard background",
    ),
    "gradient": (
        "on a gradient background",
        "over a gradient",
        "on a smooth gradient",
        "on a background with a gradient",
    ),
}
VIDEO_OPENINGS = ("a video of ", "a clip of ", "an animation of ", "video of ", "a short video showing ")
IMAGE_OPENINGS = ("an image of ", "a picture of ", "a drawing of ", "image of ", "a still image showing ")
JOINTS = (" and ", " and ", " and ", ", ", ", and ", " while ", " with ", "; ")
UNKNOWN_FILLERS = ("please", "nice", "high quality", "4k", "animated", "smooth", "beautiful")
"""Filler words around a prompt; some captions carry one so that prompts of users are in distribution."""


@dataclass(frozen=True)
class CaptionSettings:
    """Settings of captions: how much they omit and how far they stray from the plainest wording; shares are 0 to 1."""

    plain_wording: float = 0.5
    """Share of phrases in the first wording listed ("moving left", "on a striped background")."""
    omit_motion: float = 0.06
    """Share of objects whose motion is left out."""
    omit_colour: float = 0.02
    """Share of objects whose colour is left out."""
    omit_shape: float = 0.02
    """Share of objects called "shape" or "object"."""
    omit_plain_background: float = 0.65
    """Share of plain backgrounds left out: so a prompt without a background mostly shows a plain one."""
    omit_other_background: float = 0.2
    """Share of stripes, checkers and gradients left out."""
    opening: float = 0.12
    """Share of captions that begin with "a video of" or the like."""
    filler: float = 0.03
    """Share of captions with a filler word."""
    relation: float = 0.5
    """Share of two-object scenes with an equal colour or motion whose caption states it as a relation."""


EVALUATION_CAPTIONS = CaptionSettings(
    omit_motion=0.0, omit_colour=0.0, omit_shape=0.0, omit_plain_background=0.5, omit_other_background=0.5, filler=0.0
)
"""Every attribute of every object is mentioned; the background in half of the captions."""


@dataclass(frozen=True)
class Caption:
    """A text and the attributes it mentions."""

    text: str
    attributes: SceneAttributes
    spans: tuple[tuple[int, int], ...]
    """Per object: first character of its own words in `text`, and one past the last. Words that two objects share
    ("of the same colour, both moving left") are in neither."""


@dataclass(frozen=True)
class _Body:
    """The objects' part of a caption: `joint` stands between the phrases, `tail` after them."""

    phrases: tuple[str, ...]
    """The own words of each object."""
    joint: str
    tail: str = ""

    @property
    def text(self) -> str:
        return self.joint.join(self.phrases) + self.tail

    def spans(self, offset: int) -> tuple[tuple[int, int], ...]:
        """Character range of each phrase in a caption that has `offset` characters before the body."""
        spans = []
        for phrase in self.phrases:
            spans.append((offset, offset + len(phrase)))
            offset += len(phrase) + len(self.joint)
        return tuple(spans)


def write_caption(
    scene: SceneAttributes, random: Random, settings: CaptionSettings = CaptionSettings(), *, image: bool = False
) -> Caption:
    """Write a caption of a scene with every attribute; `image` words it for one frame, mostly without motion."""
    if image:
        settings = replace(settings, omit_motion=max(settings.omit_motion, 0.8))
    mentioned = tuple(_leave_out(one, random, settings) for one in scene.objects)
    omit = settings.omit_plain_background if scene.background == "plain" else settings.omit_other_background
    background = None if random.random() < omit else scene.background
    if len(mentioned) == 2 and random.random() < 0.5:
        mentioned = (mentioned[1], mentioned[0])
    body = _relation_body(mentioned, random, settings) if len(mentioned) == 2 else None
    if body is None:
        joint = JOINTS[0] if random.random() < settings.plain_wording else random.choice(JOINTS)
        body = _Body(tuple(_object_text(one, random, settings) for one in mentioned), joint)
    text, opening = body.text, ""
    if background is not None:
        words = _phrase(BACKGROUND_WORDS[background], random, settings)
        text = f"{text}, {words}" if words.startswith("plain") else f"{text} {words}"
    if random.random() < settings.opening:
        opening = random.choice(IMAGE_OPENINGS if image else VIDEO_OPENINGS)
        text = opening + text
    if random.random() < settings.filler:
        text = f"{text}, {random.choice(UNKNOWN_FILLERS)}"
    return Caption(text, SceneAttributes(mentioned, background), body.spans(len(opening)))


def _phrase(words: tuple[str, ...], random: Random, settings: CaptionSettings) -> str:
    return words[0] if random.random() < settings.plain_wording else random.choice(words)


def _leave_out(one: ObjectAttributes, random: Random, settings: CaptionSettings) -> ObjectAttributes:
    return ObjectAttributes(
        colour=None if random.random() < settings.omit_colour else one.colour,
        shape=None if random.random() < settings.omit_shape else one.shape,
        motion=None if random.random() < settings.omit_motion else one.motion,
    )


def _noun(one: ObjectAttributes, random: Random, settings: CaptionSettings, *, colour: bool = True) -> str:
    """ "a red circle", "an orange ring", "a shape"; without the colour when a relation states it."""
    noun = random.choice(("shape", "object")) if one.shape is None else _rare_synonym(SHAPE_WORDS[one.shape], random)
    if colour and one.colour is not None:
        noun = f"{_rare_synonym(COLOUR_WORDS[one.colour], random)} {noun}"
    style = random.random()
    if style < 0.12 * (1 - settings.plain_wording) * 2:
        return noun
    if style < 0.16 * (1 - settings.plain_wording) * 2:
        return f"the {noun}"
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _rare_synonym(words: tuple[str, ...], random: Random) -> str:
    return words[0] if random.random() < 0.85 else random.choice(words)


def _object_text(one: ObjectAttributes, random: Random, settings: CaptionSettings) -> str:
    noun = _noun(one, random, settings)
    if one.motion is None:
        return noun
    return f"{noun} {_phrase(_EVERY_MOTION_WORDS[one.motion], random, settings)}"


def _relation_body(mentioned: tuple[ObjectAttributes, ...], random: Random, settings: CaptionSettings) -> _Body | None:
    """Return a body that states equal colours or motions once ("both moving right"); None if nothing is equal."""
    first, second = mentioned
    same_colour = first.colour is not None and first.colour == second.colour
    same_motion = first.motion is not None and first.motion == second.motion
    if not (same_colour or same_motion) or random.random() >= settings.relation:
        return None
    colour_words = random.choice(("of the same colour", "of the same color", "in the same colour", "in the same color"))
    if same_motion:
        motion = _phrase(_EVERY_MOTION_WORDS[str(first.motion)], random, settings)
        if motion.startswith(("moves", "goes", "that")):
            motion = _EVERY_MOTION_WORDS[str(first.motion)][0]
        pair = (_noun(first, random, settings), _noun(second, random, settings, colour=not same_colour))
        return _Body(pair, " and ", f" {colour_words}, both {motion}" if same_colour else f", both {motion}")
    second_motion = "" if second.motion is None else f" {_phrase(_EVERY_MOTION_WORDS[second.motion], random, settings)}"
    first_phrase = _object_text(first, random, settings)
    second_phrase = f"{_noun(second, random, settings, colour=False)} {colour_words}{second_motion}"
    return _Body((first_phrase, second_phrase), " and ")


def stream_words() -> list[str]:
    """Return the words of endless motions that no other caption has, sorted: behind `all_words` in the tokenizer of
    streams, so that the words of clips keep their numbers."""
    words = {word for phrases in _ENDLESS_MOTION_WORDS.values() for phrase in phrases for word in phrase.split()}
    return sorted(words - set(all_words()))


def all_words() -> list[str]:
    """Return every word (and mark) of a clip's captions, lower case, sorted: the vocabulary of the tokenizer."""
    tables = (COLOUR_WORDS, SHAPE_WORDS, MOTION_WORDS, BACKGROUND_WORDS)
    phrases = [phrase for table in tables for words in table.values() for phrase in words]
    phrases += [*VIDEO_OPENINGS, *IMAGE_OPENINGS, *JOINTS]
    phrases += ["a an the shape object", "of in the same colour color both", ". , ; :"]
    words = {word for phrase in phrases for word in phrase.replace(",", " , ").replace(";", " ; ").split()}
    return sorted(words)
