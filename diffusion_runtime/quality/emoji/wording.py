"""The words of captions of the `emoji` data: motions by what moves, scenes, times, places, sizes, articles, plurals."""

from __future__ import annotations

_SIDES = ("left", "right")


def _sideways(side: str, *verbs: str) -> tuple[str, ...]:
    return tuple(f"{verb} {way}" for verb in verbs for way in (side, f"to the {side}"))


MOTIONS: dict[str, tuple[str, ...]] = {
    "still": ("standing still", "not moving", "staying still", "resting", "waiting", "motionless", "sitting still"),
    **{side: _sideways(side, "moving", "going", "moves", "goes", "heading") for side in _SIDES},
    "up": ("moving up", "going up", "flying up", "rising", "moves up", "goes up", "moving upwards", "floating up"),
    "down": (
        "moving down",
        "going down",
        "falling",
        "falling down",
        "coming down",
        "moves down",
        "sinking",
        "dropping",
    ),
    "bouncing": ("bouncing", "bouncing up and down", "jumping", "jumping up and down", "hopping", "bounces", "jumps"),
    "spinning": ("spinning", "spinning around", "turning around", "rotating", "twirling", "spins", "turning"),
    "growing": ("growing", "getting bigger", "getting larger", "growing bigger", "grows", "becoming bigger"),
}
"""Wordings that suit everything; the plainest comes first."""
OWN_MOTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "walker": {side: _sideways(side, "walking", "running", "walks", "runs") for side in _SIDES},
    "flyer": {
        **{side: _sideways(side, "flying", "flies") for side in _SIDES},
        "up": ("flying up", "taking off", "flies up"),
        "down": ("flying down", "landing"),
        "still": ("hovering",),
    },
    "swimmer": {
        **{side: _sideways(side, "swimming", "swims") for side in _SIDES},
        "up": ("jumping out of the water", "swimming up", "leaping out of the water"),
        "down": ("diving", "swimming down", "diving down"),
    },
    "car": {side: _sideways(side, "driving", "drives") for side in _SIDES},
    "boat": {side: _sideways(side, "sailing", "sails") for side in _SIDES},
    "object": {side: _sideways(side, "sliding", "rolling") for side in _SIDES},
}
"""Wordings that suit one of KINDS; the first is its plainest."""
SCENES: dict[str, tuple[str, ...]] = {
    "grass": ("on grass", "on the grass", "in a meadow", "in a green meadow", "in a field", "on a green hill"),
    "sea": ("in the sea", "at sea", "on the sea", "in the ocean", "over the sea", "on the water"),
    "snow": ("in the snow", "on snow", "on the snow", "in a snowy landscape", "in winter"),
    "street": ("in the street", "on the street", "on a street", "in the city", "in a town", "on a road", "on the road"),
    "desert": ("in the desert", "in a desert", "on sand", "on the sand", "on sand dunes"),
    "forest": ("in the forest", "in a forest", "in the woods", "among trees"),
    "sky": ("in the sky", "in the clouds", "among clouds", "between the clouds", "above the clouds"),
    "space": ("in space", "in outer space", "among the stars", "in the universe", "among planets"),
}
TIMES: dict[str, tuple[str, ...]] = {
    "day": ("by day", "during the day", "on a sunny day", "in the sunshine", "in daylight"),
    "sunset": ("at sunset", "at dusk", "in the evening", "in the sunset", "at dawn"),
    "night": ("at night", "by night", "by moonlight", "under the stars", "in the dark", "in the moonlight"),
}
SKY_AT: dict[str, tuple[str, ...]] = {
    "day": ("in the blue sky", "in a blue sky"),
    "sunset": ("in the evening sky", "in an orange sky"),
    "night": ("in the night sky", "in a starry sky", "in a dark sky"),
}
"""The scene `sky` and its time in one."""
PLACES: dict[str, tuple[str, ...]] = {
    **{side: (f"on the {side}", f"on the {side} side", f"at the {side}") for side in _SIDES},
    **{end: (f"at the {end}", f"near the {end}") for end in ("top", "bottom")},
}
SIZES: dict[str, tuple[str, ...]] = {
    "small": ("small", "little", "tiny"),
    "big": ("big", "large", "huge", "giant"),
}
VIDEO_OPENINGS = ("a video of ", "a clip of ", "an animation of ", "video of ", "a short video showing ")
IMAGE_OPENINGS = ("an image of ", "a picture of ", "a drawing of ", "image of ", "a still image showing ")
JOINTS = (" and ", " and ", " and ", ", ", ", and ", " while ", " with ", "; ")
UNCOUNTED = frozenset(
    ("fries", "french fries", "corn", "bread", "cheese", "popcorn", "coffee", "fire", "broccoli", "lightning", "earth")
)
"""Nouns without a plural here; they take "some" or "the" or nothing."""
_PLURALS = {
    "mouse": "mice",
    "sheep": "sheep",
    "deer": "deer",
    "fish": "fish",
    "face in love": "faces in love",
    "face with sunglasses": "faces with sunglasses",
    "face with heart eyes": "faces with heart eyes",
    "cup of coffee": "cups of coffee",
    "tyrannosaurus": "tyrannosaurus",
    "octopus": "octopuses",
    "rhinoceros": "rhinoceros",
}


def plural(noun: str) -> str:
    """ "cats", "foxes", "cherries"."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun + "s"


def article(phrase: str) -> str:
    """ "a" or "an" by the first letter's sound."""
    return "a" if phrase.startswith(("uni", "ufo", "u ")) or phrase[0] not in "aeiou" else "an"
