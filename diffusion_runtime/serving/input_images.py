"""Images, videos and sounds that come with a request: what each is by its head, before anything is decoded; where an
engine finds them."""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import INPUT_FIELDS
from diffusion_runtime.untrusted.image_urls import image_kind
from diffusion_runtime.untrusted.media_kinds import HEAD_BYTES, SOUNDS, container_of

IMAGES = (".png", ".jpg", ".webp")
STREAMS = (".mp4", ".mkv", ".avi", *SOUNDS)
# Parts of a PNG or JPEG beside its pixels, and of a PNG's pixels. Cameras and editors write fewer than a hundred and a
# few thousand; a decoder passes them one by one, at up to 4 ms each.
_MAX_PARTS, _MAX_PIXEL_PARTS = 1000, 20_000
# Bytes of a JPEG before its pixels, of which Pillow copies what it has at every further part.
_MAX_HEAD = 16 * 2**20
# Of a progressive JPEG, where ten are usual: each is a pass over all pixels.
_MAX_SCANS = 64
_ALONE = (0x01, *range(0xD0, 0xD9))
_PIXELS, _END = 0xDA, 0xD9


def check_image(field: str, content: bytes, max_pixels: int) -> str:
    """Return the extension of an image. Raises RequestError for what is no PNG, JPEG or WebP, for one of more than
    max_pixels, and for one of so many parts that decoding it takes seconds whatever its size."""
    kind, extension = image_kind(field, content)
    if not _has_few_parts(kind, content):
        raise RequestError(f"{field}: the image has more parts than any program writes; save it again, as PNG")
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=(kind,)) as image:
                width, height = image.size
    except Image.DecompressionBombError as error:
        raise RequestError(f"{field}: the image has too many pixels, at most {max_pixels} are taken") from error
    # Any exception: a decoder may raise anything on untrusted bytes.
    except Exception as error:
        raise RequestError(f"{field}: the image is damaged: {type(error).__name__}") from error
    if width * height > max_pixels:
        raise RequestError(f"{field}: the image has {width} x {height} pixels, at most {max_pixels} are taken")
    return extension


def check_media(field: str, content: bytes, max_pixels: int) -> str:
    """Return the extension of an image, a video or a sound. Raises RequestError for what is none, and for an image that
    `check_image` refuses. What is in a video or a sound is found by the engine, which decodes no more of it than its
    model takes."""
    extension = container_of(content[:HEAD_BYTES])
    if extension in IMAGES:
        return check_image(field, content, max_pixels)
    if extension not in STREAMS:
        raise RequestError(
            f"{field}: expected an image (PNG, JPEG, WebP), a video (mp4, mkv, webm, avi) or a sound (wav, flac, mp3, "
            "ogg, m4a)"
        )
    return extension.removeprefix(".")


def _has_few_parts(kind: str, content: bytes) -> bool:
    return {"PNG": _few_chunks, "JPEG": _few_segments}.get(kind, lambda _: True)(content)


def _few_chunks(content: bytes) -> bool:
    at, num_pixel_parts, num_others, num_profiles = 8, 0, 0, 0
    while at + 8 <= len(content):
        size, name = struct.unpack_from(">I4s", content, at)
        at += 12 + size
        num_pixel_parts += name == b"IDAT"
        num_others += name != b"IDAT"
        # Each is inflated.
        num_profiles += name == b"iCCP"
        if num_pixel_parts > _MAX_PIXEL_PARTS or num_others > _MAX_PARTS or num_profiles > 1:
            return False
    return True


def _few_segments(content: bytes) -> bool:
    """Return whether a JPEG has few scans of its pixels, and before them few segments and few bytes between these."""
    if content.count(bytes((0xFF, _PIXELS))) > _MAX_SCANS:
        return False
    at = 2
    for _ in range(_MAX_PARTS):
        if at + 4 > len(content):
            return True
        marker = content[at + 1]
        if content[at] != 0xFF or marker in (0x00, 0xFF):
            at += 1
        elif marker in (_PIXELS, _END):
            return at <= _MAX_HEAD
        else:
            at += 2 if marker in _ALONE else 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return False


def names_files(field: str) -> bool:
    """Return whether the value of a request's field is the path of a file, or several."""
    return field.endswith("_path") or field in INPUT_FIELDS


def refuse_elsewhere(request: Mapping[str, Any], inputs: Path | None) -> None:
    """Raises RequestError for a request that names a file outside the folder of inputs, where there is one.
    The server writes all of them there; an engine that checks it reads no other file of its machine, whoever speaks to
    it."""
    if inputs is None:
        return
    for name, value in request.items():
        for path in _texts(value) if names_files(name) else ():
            if os.path.realpath(path) != os.path.join(os.path.realpath(inputs), os.path.basename(path)):
                raise RequestError(f"{name}: names a file that did not come with the request")


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value and in the lists in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
