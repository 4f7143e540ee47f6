"""Switches as a request has them: another prompt, or another seed, from some frame or time of the video on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.request.fields import MAX_COUNT, SeedNumber, Text

# (frame of the video, or a time of it as "5s", prompt).
PromptSwitch: TypeAlias = tuple[int | str, str]
# The same with a seed.
SeedSwitch: TypeAlias = tuple[int | str, int]
# What becomes of the keys and values in sight when the prompt changes.
SWITCH_MODES = ("recache", "recache_at_once", "keep")
MAX_SWITCHES = 1000

_TIME = re.compile(r"(?:(?P<minutes>[0-9]{1,5})m)?(?:(?P<seconds>[0-9]{1,7}(?:\.[0-9]{1,3})?)s)?")
_FRAME = re.compile(r"([0-9]{1,9})f")
# Seconds or a frame: it does not say.
_NUMBER = re.compile(r"[0-9]{1,7}(\.[0-9]{1,3})?")
_SEED = re.compile(r"[0-9]{1,19}")
# The same as a pattern of JSON Schema, frames included.
TIME = r"^\s*([0-9]{1,5}m([0-9]{1,7}(\.[0-9]{1,3})?s)?|[0-9]{1,7}(\.[0-9]{1,3})?s|[0-9]{1,9}f)\s*$"
_FORMS = "5s, 1m30s, 2.5s, or a frame as 48f"


@dataclass(frozen=True)
class PromptSwitches:
    """Check of a tuple of PromptSwitch."""

    metavar: ClassVar[str] = "TIME PROMPT"
    # Of the flag, which may be given again.
    kind: ClassVar[Any] = list[str]

    def read(self, value: object) -> object:
        """Return pairs, of texts as "5s a blue star" too."""
        return _read_pairs(value)

    def __call__(self, name: str, value: object) -> None:
        name = f"{name} (--at)"
        for at, prompt in _checked_pairs(name, value, "a prompt, such as [5s, a red circle]", "prompts"):
            Text(needs_words=True)(f"{name}, at {at}", prompt)
            _check_time(name, at)


@dataclass(frozen=True)
class SeedSwitches:
    """Check of a tuple of SeedSwitch."""

    metavar: ClassVar[str] = "TIME SEED"
    # Of the flag, which may be given again.
    kind: ClassVar[Any] = list[str]

    def read(self, value: object) -> object:
        """Return pairs, of texts as "5s 7" too."""
        pairs = _read_pairs(value)
        if not isinstance(pairs, tuple):
            return pairs
        return tuple((item[0], _seed(item[1])) if _is_pair(item) else item for item in pairs)

    def __call__(self, name: str, value: object) -> None:
        name = f"{name} (--seed-at)"
        for at, seed in _checked_pairs(name, value, "a seed, such as [5s, 7]", "seeds"):
            SeedNumber()(f"{name}, at {at}", seed)
            _check_time(name, at)


def _checked_pairs(name: str, value: object, second: str, what: str) -> tuple[tuple[Any, Any], ...]:
    """Raises RequestError for anything but pairs. second: their second part, with an example; what: the same of
    several."""
    if not isinstance(value, tuple) or not value or not all(_is_pair(item) for item in value):
        raise RequestError(f"{name}: expected pairs of a time and {second}, got {shown(value)}")
    if len(value) > MAX_SWITCHES:
        raise RequestError(f"{name}: expected at most {MAX_SWITCHES} {what}, got {len(value)}")
    return value


def _check_time(name: str, at: object) -> None:
    if isinstance(at, str):
        seconds_of(at, name)
    elif type(at) is not int or not 1 <= at <= MAX_COUNT:
        raise RequestError(f"{name}: expected a frame from 1 to {MAX_COUNT}, or a time ({_FORMS}), got {shown(at)}")


def _read_pairs(value: object) -> object:
    """Return lists of pairs, or of texts as "5s a blue star", as tuples, `48f` as the frame 48; anything else as it is.
    None for an empty list."""
    if not isinstance(value, list | tuple):
        return value
    pairs = [item.strip().split(None, 1) if isinstance(item, str) else item for item in value]
    return tuple((_frame(item[0]), item[1]) if _is_pair(item) else item for item in pairs) or None


def seconds_of(at: str, name: str) -> float:
    """`5s` or `1m30s` in seconds. Raises RequestError that names the field for any other text."""
    found = _TIME.fullmatch(at.strip()) if at.strip() else None
    if found is None:
        raise RequestError(f"{name}: expected a time ({_FORMS}), got {shown(at)}{_units(at)}")
    return 60 * int(found["minutes"] or 0) + float(found["seconds"] or 0)


def _units(at: str) -> str:
    """Return what to type in place of digits alone."""
    number = at.strip()
    if _NUMBER.fullmatch(number) is None:
        return ""
    return f": {number}s for seconds" + ("" if "." in number else f", {number}f for a frame")


def _is_pair(item: object) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2


def _seed(text: object) -> object:
    """Digits as a number."""
    return int(text) if isinstance(text, str) and _SEED.fullmatch(text.strip()) else text


def _frame(at: object) -> object:
    """`48f` as a number. A text of digits alone stays: whether it means seconds or frames is for its writer to say."""
    found = _FRAME.fullmatch(at.strip()) if isinstance(at, str) else None
    return at if found is None else int(found[1])
