"""Character masks: images and a driving video of which masks in colours say who is who, of models that animate or
replace characters.

Blue, red, green, magenta, cyan and yellow are characters, the same in all masks; white is background that is to be
seen, black is none (Yan et al. 2026, SCAIL-2, arXiv:2606.10804). Images and videos fill the clip, what is beyond its
ratio of the sides is cut off.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy

from diffusion_runtime.core.latent_geometry import ClipSize, misfit
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.clips import each_picture
from diffusion_runtime.media.images import inspect_picture, open_picture
from diffusion_runtime.models.driving_video import DrivingVideo
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# The file fields of requests that such models take, and what is said of a missing one.
FILES = dict.fromkeys(("image_path", "image_mask_path", "video_path", "mask_path"), True)
_COLORS = "blue, red, green, magenta, cyan or yellow"
MISSING = {
    "image_mask_path": f"this model needs a mask of the image, {_COLORS} where a character is; give one",
    "video_path": "this model moves characters as in a video; give one",
    "mask_path": f"this model needs a mask of the video, {_COLORS} where a character is; give one",
}
# The values of red, green and blue above which a colour is on.
ON = 225
# Levels by which compression moves colours, and the least share of a mask's pixels that still have one.
_ROUNDING, _LEAST_SHARE = 30, 0.8
# White and the colours, by which of red, green and blue are on, in the order of the channels that models read.
CLASSES = ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))


@dataclass(frozen=True)
class MaskedDrivingVideo(DrivingVideo):
    """Animation by a driving video with masks. The first image is the scene; further ones are other views of its
    characters or of its background. channels: of the latents that a mask becomes."""

    channels: int

    most: ClassVar[int] = 8

    def num_references(self, request: GenerationRequest) -> int:  # noqa: ARG002 - see VideoControl
        """Return 0: images are tokens behind the clip's."""
        return 0

    def further_shapes(self, request: GenerationRequest, size: ClipSize) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the driving video at half the size, and of the images, each with its mask."""
        channels, frames, height, width = self.geometry.latent_shape(size.height, size.width, size.num_frames)
        num_images, beside = max(1, len(image_paths(request, "image_path"))), channels + self.channels
        return (beside, frames, height // 2, width // 2), (beside, num_images, height, width)

    def check(self, request: GenerationRequest, size: ClipSize) -> None:
        """Check that a request's inputs can make a clip of this size. Raises RequestError."""
        assert request.video_path is not None, "the rules require it"
        assert request.mask_path is not None, "the rules require it"
        self.check_frames(size)
        self._check_segments(request, size)
        images, masks = image_paths(request, "image_path"), image_paths(request, "image_mask_path")
        if len(images) != len(masks):
            raise RequestError(
                f"image_mask_path: expected {len(images)}, one for each image in their order, got {len(masks)}"
            )
        for image, mask in zip(images, masks, strict=True):
            sizes = inspect_picture(mask, "image_mask_path").size, inspect_picture(image).size
            _check_size(f"image_mask_path: {mask}", sizes, f"its image {image}")
        for mask in masks:
            # Another view may be of the background alone.
            _check_mask("image_mask_path", mask, 1, marks_character=mask == masks[0])
        video = self.check_length(request.video_path, "video_path", "the motion", size)
        of_video = self.check_length(request.mask_path, "mask_path", "the masks of the driving video", size)
        sizes = (of_video.width, of_video.height), (video.width, video.height)
        _check_size(f"mask_path: {request.mask_path}", sizes, f"its video {request.video_path}")
        _check_mask("mask_path", request.mask_path, size.num_frames)

    def _check_segments(self, request: GenerationRequest, size: ClipSize) -> None:
        """Check that a longer video is made in whole segments, from latents of whole frames."""
        longest, overlap = request.segment_frames, request.segment_overlap
        if longest is None or overlap is None or size.num_frames <= longest:
            return
        step, remainder = self.geometry.frame_rule
        if overlap % step != remainder % step:
            raise RequestError(misfit("segment_overlap", overlap, step, remainder))
        if (size.num_frames - overlap) % (longest - overlap):
            below = size.num_frames - (size.num_frames - overlap) % (longest - overlap)
            raise RequestError(
                f"num_frames: expected whole segments, {longest} frames and {longest - overlap} for each further one, "
                f"got {size.num_frames}; use {below} or {below + longest - overlap}"
            )

    def remarks(self, request: GenerationRequest, size: ClipSize) -> Iterator[str]:
        """Yield sentences on the parts of the inputs that are not used as they are."""
        for path in image_paths(request, "image_path"):
            yield from _cut(f"image_path: {path}", inspect_picture(path).size, size)
        yield from self.video_remarks(request.video_path, size)
        replaces, mask = request.character_mode == "replace", request.mask_path
        if mask is not None and _inspect_mask("mask_path", mask, size.num_frames).is_white != replaces:
            found, mode, other = ("black", "replace", "animate") if replaces else ("white", "animate", "replace")
            yield (
                f"mask_path: {mask}: its background is mostly {found}, and --character-mode is {mode}, which was "
                f"trained with the other; {other} takes this one"
            )


def covering(picture: Any, height: int, width: int) -> Any:
    """Return the middle of one of Pillow's RGB pictures, scaled so that it just fills height x width."""
    from PIL import Image

    columns, rows = picture.size
    if columns / rows > width / height:
        scaled = max(width, int(columns * height / rows)), height
    else:
        scaled = width, max(height, int(rows * width / columns))
    left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
    whole = picture if scaled == picture.size else picture.resize(scaled, Image.Resampling.BICUBIC)
    return whole.crop((left, top, left + width, top + height))


def _cut(named: str, sides: tuple[int, int], size: ClipSize) -> Iterator[str]:
    columns, rows = sides
    kept = min(columns, rows * size.width / size.height), min(rows, columns * size.height / size.width)
    if kept[0] < columns - 1 or kept[1] < rows - 1:
        yield (
            f"{named} is {columns} x {rows} (width x height), of another ratio than the clip: its middle, "
            f"{kept[0]:.0f} x {kept[1]:.0f}, is used"
        )


def _check_size(named: str, sizes: tuple[tuple[int, int], tuple[int, int]], of: str) -> None:
    mask, whole = sizes
    if mask != whole:
        raise RequestError(
            f"{named} is {mask[0]} x {mask[1]} (width x height), {of} {whole[0]} x {whole[1]}; a mask has the size of "
            "what it masks"
        )


@dataclass(frozen=True)
class _MaskFacts:
    """share: of the first picture's pixels that have a colour of masks. is_white: whether more of them are white than
    black. has_character: whether any picture has a character's colour."""

    share: float
    is_white: bool
    has_character: bool


def _check_mask(field: str, path: str, most: int, *, marks_character: bool = True) -> None:
    """Check that a file is a mask in colours, with a character where it must have one. Raises RequestError."""
    facts, colors = _inspect_mask(field, path, most), f"{_COLORS} where a character is; black and white are background"
    if facts.share < _LEAST_SHARE:
        raise RequestError(
            f"{field}: {path} is no mask: {100 * facts.share:.0f} % of its pixels have the colour of one; expected "
            f"{colors}"
        )
    if marks_character and not facts.has_character:
        raise RequestError(f"{field}: {path} marks no character: expected {colors}")


def _inspect_mask(field: str, path: str, most: int) -> _MaskFacts:
    state = os.stat(path)
    return _inspected(field, path, most, (state.st_ino, state.st_size, state.st_mtime_ns))


# A dry run, the checks of every prompt and the report ask again and again; a changed file is another entry.
@functools.lru_cache(maxsize=64)
def _inspected(field: str, path: str, most: int, _state: tuple[int, ...]) -> _MaskFacts:
    pictures = iter([open_picture(path, field)]) if field == "image_mask_path" else each_picture(path, field, most)
    first = numpy.asarray(next(pictures))
    dark, bright = first < 255 - ON + _ROUNDING, first > ON - _ROUNDING
    is_white = bool(bright.all(axis=-1).sum() > dark.all(axis=-1).sum())
    has_character = any(map(_has_character, itertools.chain([first], map(numpy.asarray, pictures))))
    return _MaskFacts(float((dark | bright).all(axis=-1).mean()), is_white, has_character)


def _has_character(pixels: Any) -> bool:
    on = pixels > ON
    return bool((on.any(axis=-1) & ~on.all(axis=-1)).any())
