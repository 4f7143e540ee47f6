"""Prompt switches as a request has them: another prompt from some frame or time of the video on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.request_fields import MAX_COUNT, Text

# (frame of the video, or a time of it as "5s", prompt).
PromptSwitch: TypeAlias = tuple[int | str, str]
# What becomes of the keys and values in sight when the prompt changes.
SWITCH_MODES = ("recache", "recache_at_once", "keep")
MAX_SWITCHES = 1000

_TIME = re.compile(r"(?:(?P<minutes>[0-9]{1,5})m)?(?:(?P<seconds>[0-9]{1,7}(?:\.[0-9]{1,3})?)s)?")
# The same as a pattern of JSON Schema, frames included.
TIME = r"^\s*([0-9]{1,5}m([0-9]{1,7}(\.[0-9]{1,3})?s)?|[0-9]{1,7}(\.[0-9]{1,3})?s|[0-9]{1,9}f?)\s*$"
_FORMS = "5s, 1m30s, 2.5s, or a frame as 48f"


@dataclass(frozen=True)
class PromptSwitches:
    """Check of a tuple of PromptSwitch."""

    metavar: ClassVar[str] = "TIME PROMPT"
    # Of the flag, which may be given again.
    kind: ClassVar[Any] = list[str]

    def __call__(self, name: str, value: object) -> None:
        name = f"{name} (--at)"
        if not isinstance(value, tuple) or not value or not all(_is_pair(item) for item in value):
            raise RequestError(
                f"{name}: expected pairs of a time and a prompt, such as [5s, a red circle], got {shown(value)}"
            )
        if len(value) > MAX_SWITCHES:
            raise RequestError(f"{name}: expected at most {MAX_SWITCHES} prompts, got {len(value)}")
        for at, prompt in value:
            Text(needs_words=True)(f"{name}, at {at}", prompt)
            if isinstance(at, str):
                seconds_of(at, name)
            elif type(at) is not int or not 1 <= at <= MAX_COUNT:
                raise RequestError(
                    f"{name}: expected a frame from 1 to {MAX_COUNT}, or a time ({_FORMS}), got {shown(at)}"
                )


def parse_switches(value: object) -> object:
    """Lists of pairs, or of texts as "5s a blue star", as tuples, `48f` as the frame 48; anything else as it is, for
    PromptSwitches to refuse. None for an empty list."""
    if not isinstance(value, list | tuple):
        return value
    pairs = [item.strip().split(None, 1) if isinstance(item, str) else item for item in value]
    return tuple((_frame(item[0]), item[1]) if _is_pair(item) else item for item in pairs) or None


def seconds_of(at: str, name: str) -> float:
    """`5s` or `1m30s` in seconds. Raises RequestError that names the field for any other text."""
    found = _TIME.fullmatch(at.strip()) if at.strip() else None
    if found is None:
        raise RequestError(f"{name}: expected a time ({_FORMS}), got {shown(at)}")
    return 60 * int(found["minutes"] or 0) + float(found["seconds"] or 0)


def _is_pair(item: object) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2


def _frame(at: object) -> object:
    """`48f` and `48` as a number."""
    if isinstance(at, str) and (digits := at.strip().removesuffix("f")).isdecimal() and len(digits) <= 9:
        return int(digits)
    return at
