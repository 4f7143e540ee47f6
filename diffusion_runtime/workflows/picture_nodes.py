"""Nodes of pictures, videos and sound: files, sizes, latents of them, and what is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.input_files import found_input, size_of
from diffusion_runtime.workflows.values import (
    MaskValue,
    MovieValue,
    PictureValue,
    SoundValue,
    Unknown,
)

_MEGAPIXEL = 1024 * 1024
_MAX_PICTURES, _MAX_CHANGES = 1000, 100
Size = tuple[int, int]


def _load_image(call: Call) -> tuple[Any, ...]:
    file = call.text("image")
    path = found_input(file, call.places)
    return PictureValue(call.node, file, size=None if path is None else size_of(path)), MaskValue(call.node, file)


def _empty_image(call: Call) -> tuple[Any, ...]:
    """EmptyImage: one colour; where it counts as a picture it is no file."""
    width, height = call.size("width", 512), call.size("height", 512)
    known = isinstance(width, int) and isinstance(height, int)
    return (PictureValue(call.node, size=(width, height) if known else None),)  # type: ignore[arg-type]


def _load_video(call: Call) -> tuple[Any, ...]:
    return (PictureValue(call.node, call.text("file"), is_film=True),)


def _components(call: Call) -> tuple[Any, ...]:
    film = call.raw("video")
    if isinstance(film, MovieValue):
        return film.pictures, film.sound, film.fps, 8, "sRGB"
    film = call.of("video", PictureValue)
    return film, SoundValue(call.node, film.file), Unknown("the rate of a video that is read"), 8, "sRGB"


def _load_audio(call: Call) -> tuple[Any, ...]:
    return (SoundValue(call.node, call.text("audio")),)


def _same(call: Call) -> tuple[Any, ...]:
    return (call.of("audio", SoundValue),)


def pictures_of(call: Call, values: Sequence[PictureValue]) -> tuple[PictureValue, ...]:
    """Return every picture of batches. Raises NotSupportedError for more than any model takes: batches of batches
    double with each node."""
    if sum(len(value.parts) or 1 for value in values) > _MAX_PICTURES:
        call.refuse(f"expected at most {_MAX_PICTURES} pictures")
    return tuple(part for value in values for part in (value.parts or (value,)))


def _batch(call: Call) -> tuple[Any, ...]:
    pictures = call.named_like("image", PictureValue)
    if not pictures:
        return (None,)
    parts = pictures_of(call, pictures)
    return (dataclasses.replace(pictures[0], parts=parts) if len(parts) > 1 else parts[0],)


def _stitched(call: Call) -> tuple[Any, ...]:
    """ImageStitch: of one picture, that picture."""
    if call.maybe("image2", PictureValue) is not None:
        call.refuse("two pictures beside each other; make one file of them, and give it: --set NODE.image=FILE")
    return (call.of("image1", PictureValue),)


def _scaled(call: Call, picture: PictureValue, size: Size | None) -> tuple[Any, ...]:
    if size is not None:
        size = (max(size[0], 1), max(size[1], 1))
    return (dataclasses.replace(_changed(call, picture), size=size),)


def _changed(call: Call, picture: PictureValue) -> PictureValue:
    if len(picture.changed_by) >= _MAX_CHANGES:
        call.refuse(f"expected at most {_MAX_CHANGES} changes of one picture")
    return dataclasses.replace(picture, changed_by=(*picture.changed_by, call.node))


def _to_pixels(call: Call) -> tuple[Any, ...]:
    picture = call.of("image", PictureValue)
    total, steps = call.number("megapixels", 1.0) * _MEGAPIXEL, max(call.whole("resolution_steps", 1), 1)
    return _scaled(call, picture, _of_pixels(picture.size, total, steps))


def _of_pixels(size: Size | None, total: float, steps: int = 1) -> Size | None:
    if size is None:
        return None
    factor = math.sqrt(total / (size[0] * size[1]))
    return round(size[0] * factor / steps) * steps, round(size[1] * factor / steps) * steps


def _to_size(call: Call) -> tuple[Any, ...]:
    picture, width, height = call.of("image", PictureValue), call.size("width", 0), call.size("height", 0)
    if isinstance(width, Unknown) or isinstance(height, Unknown):
        return _scaled(call, picture, None)
    return _scaled(call, picture, _with_sides(picture.size, width, height))


def _with_sides(size: Size | None, width: int, height: int) -> Size | None:
    """Return a size with given sides; 0 keeps the proportions."""
    if width and height:
        return width, height
    if size is None or not (width or height):
        return size
    factor = width / size[0] if width else height / size[1]
    return round(size[0] * factor), round(size[1] * factor)


def _by_factor(call: Call) -> tuple[Any, ...]:
    picture, factor = call.of("image", PictureValue), call.number("scale_by", 1.0)
    return _scaled(call, picture, _multiplied(picture.size, factor))


def _multiplied(size: Size | None, factor: float) -> Size | None:
    return None if size is None else (round(size[0] * factor), round(size[1] * factor))


def _to_longer(call: Call) -> tuple[Any, ...]:
    picture = call.of("image", PictureValue)
    return _scaled(call, picture, _longer(picture.size, call.whole("largest_size", 512)))


def _longer(size: Size | None, side: int) -> Size | None:
    return None if size is None else _multiplied(size, side / max(size))


def _resized(call: Call) -> tuple[Any, ...]:
    """ResizeImageMaskNode: one of several ways, by name."""
    picture, way = call.of("input", PictureValue), call.text("resize_type", "scale dimensions")
    size = picture.size

    def option(name: str, default: float) -> float | None:
        value = call.raw(f"resize_type.{name}", default)
        return None if isinstance(value, Unknown) else call.number(f"resize_type.{name}", default)

    if way == "scale dimensions":
        width, height = option("width", 0), option("height", 0)
        known = width is not None and height is not None
        return _scaled(call, picture, _with_sides(size, int(width or 0), int(height or 0)) if known else None)
    ways: Mapping[str, Callable[[], Size | None]] = {
        "scale by multiplier": lambda: _multiplied(size, option("multiplier", 1.0) or 1.0),
        "scale longer dimension": lambda: _longer(size, int(option("longer_size", 1024) or 1024)),
        "scale shorter dimension": lambda: (
            None if size is None else _multiplied(size, (option("shorter_size", 1024) or 1024) / min(size))
        ),
        "scale width": lambda: _with_sides(size, int(option("width", 1024) or 0), 0),
        "scale height": lambda: _with_sides(size, 0, int(option("height", 1024) or 0)),
        "scale total pixels": lambda: _of_pixels(size, (option("megapixels", 1.0) or 1.0) * _MEGAPIXEL),
    }
    if way not in ways:
        call.refuse(f"resize_type: expected scale dimensions or {', '.join(ways)}, got {way}")
    return _scaled(call, picture, ways[way]())


def _kontext(call: Call) -> tuple[Any, ...]:
    return _scaled(call, call.of("image", PictureValue), None)


def _compressed(call: Call) -> tuple[Any, ...]:
    """LTXVPreprocess: one frame of H.264 at a constant rate factor."""
    return (_changed(call, call.of("image", PictureValue)),)


def _trimmed(call: Call) -> tuple[Any, ...]:
    """TrimAudioDuration, from the beginning: as long as the clip here."""
    if call.number("start_index", 0.0) != 0:
        call.refuse("start_index: expected 0: a sound is read from its beginning")
    call.replaced("as much of the sound as the clip is long")
    return (call.of("audio", SoundValue),)


def _movie(call: Call) -> tuple[Any, ...]:
    pictures, rate = call.of("images", PictureValue), call.raw("fps", 24)
    if call.raw("bit_depth", 8) not in (8, "8", "auto"):
        call.replaced("8 bits per colour, as the model's decoder is trained for")
    if isinstance(rate, Unknown):
        call.replaced("the model's rate, or --fps, where ComfyUI writes that of the video that is read")
    fps = 0.0 if isinstance(rate, Unknown) else float(call.number("fps", 24))
    return (MovieValue(call.node, pictures, fps, call.maybe("audio", SoundValue)),)


def _save(name: str) -> Callable[[Call], tuple[Any, ...]]:
    def run(call: Call) -> tuple[Any, ...]:
        value = call.raw(name)
        if not isinstance(value, PictureValue | MovieValue):
            call.refuse(f"{name}: nothing is linked; expected pictures or a video")
        call.replaced("the file that --output-path names")
        return (value,)

    return run


def _save_frames(call: Call) -> tuple[Any, ...]:
    call.replaced("the file that --output-path names")
    return (MovieValue(call.node, call.of("images", PictureValue), float(call.number("fps", 16))),)


def _cut(call: Call) -> tuple[Any, ...]:
    """ImageFromBatch: the first frames of a video that is read, or the first pictures of a batch."""
    picture = call.of("image", PictureValue)
    if call.whole("batch_index", 0) != 0 or picture.decoded is not None:
        call.refuse("frames are cut out of a video, which no request says")
    length = max(call.whole("length", 1), 1)
    if not picture.is_film:
        parts = picture.parts[:length]
        return (dataclasses.replace(picture, parts=parts) if len(parts) > 1 else (*parts, picture)[0],)
    before = length if picture.num_frames is None else picture.num_frames
    return (dataclasses.replace(picture, num_frames=min(length, before)),)


TABLE: Mapping[str, NodeClass] = {
    "LoadImage": NodeClass(_load_image),
    "LoadImageOutput": NodeClass(_load_image),
    "EmptyImage": NodeClass(_empty_image),
    "LoadVideo": NodeClass(_load_video),
    "GetVideoComponents": NodeClass(_components),
    "LoadAudio": NodeClass(_load_audio),
    "BatchImagesNode": NodeClass(_batch),
    "ImageBatch": NodeClass(_batch),
    "ImageStitch": NodeClass(_stitched),
    "ImageFromBatch": NodeClass(_cut),
    "ImageScale": NodeClass(_to_size),
    "ImageScaleBy": NodeClass(_by_factor),
    "ImageScaleToTotalPixels": NodeClass(_to_pixels),
    "ImageScaleToMaxDimension": NodeClass(_to_longer),
    "ResizeImageMaskNode": NodeClass(_resized),
    "FluxKontextImageScale": NodeClass(_kontext),
    "LTXVPreprocess": NodeClass(_compressed),
    "TrimAudioDuration": NodeClass(_trimmed),
    "CreateVideo": NodeClass(_movie),
    "SaveVideo": NodeClass(_save("video")),
    "SaveImage": NodeClass(_save("images")),
    "SaveImageAdvanced": NodeClass(_save("images")),
    "PreviewImage": NodeClass(_save("images")),
    "SaveAnimatedWEBP": NodeClass(_save_frames),
    "SaveWEBM": NodeClass(_save_frames),
}
# The classes whose input is what a workflow makes; the others are asked only where there is none of these.
OUTPUTS = ("SaveVideo", "SaveImage", "SaveImageAdvanced", "SaveAnimatedWEBP", "SaveWEBM")
PREVIEWS = ("PreviewImage",)
