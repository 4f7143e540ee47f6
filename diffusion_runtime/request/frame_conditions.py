"""Images at any frame of a video as a request has them: `FRAME:FILE[@STRENGTH]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.request.fields import MAX_COUNT, ImageFile
from diffusion_runtime.request.given_images import as_image_paths, check_given

# (frame of the video from 0, path of an image, strength).
FrameCondition: TypeAlias = tuple[int, str, float]
MAX_CONDITIONS = 100
# The same as a pattern of JSON Schema.
TEXT = r"^\s*[0-9]{1,7}\s*:\s*\S"

_FORM = "FRAME:FILE[@STRENGTH], such as 48:middle.png@0.8"
_TEXT = re.compile(r"\s*(?P<frame>[0-9]{1,7})\s*:\s*(?P<path>\S.*)", re.DOTALL)
_STRENGTH = re.compile(r"(?P<path>.+)@(?P<strength>-?[0-9]*\.?[0-9]+)")


@dataclass(frozen=True)
class FrameConditions(ImageFile):
    """Check of a tuple of FrameCondition: frames in any order, each once; whether the video has them and the images can
    be read is the model's rules to check."""

    metavar: ClassVar[str] = "N:FILE[@X]"
    # Of the flag, which may be given again.
    kind: ClassVar[Any] = list[str]

    def read(self, value: object) -> object:
        """Return texts as `48:middle.png@0.8`, or lists [48, middle.png, 0.8], in a list, as tuples of (48,
        "middle.png", 0.8); a strength that is left out is 1. What is behind the last `@` and is no number belongs to
        the path. None for an empty list."""
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            return value
        return tuple(_parsed(item) for item in value) or None

    def __call__(self, name: str, value: object) -> None:
        """Raises RequestError for a frame, a path or a strength that cannot be, and for a frame that is given twice."""
        name = f"{name} (--condition-at)"
        if not isinstance(value, tuple) or not value:
            raise RequestError(f"{name}: expected {_FORM}, once for each image, got {shown(value)}")
        if len(value) > MAX_CONDITIONS:
            raise RequestError(f"{name}: expected at most {MAX_CONDITIONS} images, got {len(value)}")
        for item in value:
            if not isinstance(item, tuple) or len(item) != 3:
                raise RequestError(f"{name}: expected {_FORM}, got {shown(item)}")
            frame, path, strength = item
            if type(frame) is not int or not 0 <= frame <= MAX_COUNT:
                raise RequestError(f"{name}: expected a frame of the video from 0, got {shown(frame)}; {_FORM}")
            if not isinstance(path, str) or not path:
                raise RequestError(f"{name}: expected the path of an image, got {shown(path)}; {_FORM}")
            check_given(name, path)
            if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 <= strength <= 1:
                raise RequestError(
                    f"{name}: expected a strength from 0 to 1, got {shown(strength)} for frame {frame}; {_FORM}"
                )
        frames = [item[0] for item in value]
        twice = next((frame for frame in frames if frames.count(frame) > 1), None)
        if twice is not None:
            raise RequestError(f"{name}: expected each frame once, got frame {twice} twice; leave one of them out")


def keyframes_between(
    num_frames: int, interval: int | None, conditions: tuple[FrameCondition, ...] | None
) -> tuple[int, ...]:
    """Return the frames at which a model makes keyframes beside a video: every `interval` ones after the first, none at
    a frame that has an image; no frame without an interval."""
    if interval is None:
        return ()
    taken = {frame for frame, _, _ in conditions or ()}
    return tuple(frame for frame in range(interval, num_frames, interval) if frame not in taken)


def _parsed(item: object) -> object:
    if isinstance(item, str) and (found := _TEXT.fullmatch(item)):
        path, strength = found["path"], 1.0
        if with_strength := _STRENGTH.fullmatch(path):
            path, strength = with_strength["path"], float(with_strength["strength"])
        return int(found["frame"]), as_image_paths(path), strength
    if isinstance(item, list | tuple) and len(item) in (2, 3):
        return (item[0], as_image_paths(item[1]), *(item[2:] or (1.0,)))
    return item
