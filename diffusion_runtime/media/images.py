"""Reads the input images of image-to-video generation; files may be untrusted."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy
import numpy.typing

from diffusion_runtime.errors import RequestError, first_line
from diffusion_runtime.untrusted.files import check_file

MAX_IMAGE_BYTES = 512 * 1024 * 1024
# Pillow refuses twice its own limit of 89 megapixels by itself; phones take up to 200.
MAX_PIXELS = 170_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# How far the ratio of the sides may be from the clip's: a smaller difference is not visible as stretching.
MAX_STRETCH = 0.1


def open_picture(path: str, field: str = "image_path") -> Any:
    """An image file as Pillow's RGB image of its own size, turned upright by its EXIF orientation.

    Grey, palette, CMYK and 16-bit images are converted, and colours of another profile to sRGB; of an animation it is
    the first frame. field: of the request, for messages. Raises RequestError for a file that is missing, damaged or no
    image, and for one with transparent parts: the background behind them is not defined.
    """
    return _read(path, field)[0]


def picture_remarks(path: str, field: str) -> tuple[str, ...]:
    """What of an image file is not used as it stands there, as sentences. Raises what open_picture raises."""
    return tuple(f"{field}: {path}: {remark}" for remark in _read(path, field)[1])


def _read(path: str, field: str) -> tuple[Any, tuple[str, ...]]:
    """The image, and remarks on it."""
    from PIL import Image, ImageOps

    source = check_file(path, field, max_bytes=MAX_IMAGE_BYTES, error=RequestError)
    try:
        with warnings.catch_warnings():
            # Its limit of 89 megapixels is below what phones take; ours follows, before a pixel is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(source, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}")
                is_animated = bool(getattr(image, "is_animated", False))
                image.seek(0)
                upright = ImageOps.exif_transpose(image)
                is_transparent = _is_transparent(upright)
                converted, remarks = _in_srgb(_eight_bits(upright), image.info.get("icc_profile"))
    except Exception as error:  # any exception: a decoder may raise anything on untrusted bytes
        raise RequestError(
            f"{field}: {source} is not a readable {', '.join(FORMATS)} image: {first_line(error)}"
        ) from error
    if is_transparent:
        raise RequestError(
            f"{field}: {source} has transparent parts; put it on a background, and save it without transparency"
        )
    return converted, (*remarks, *(("it is animated: its first frame is used",) if is_animated else ()))


def _in_srgb(image: Any, profile: bytes | None) -> tuple[Any, tuple[str, ...]]:
    """A Pillow image as RGB in sRGB, and remarks. profile: the ICC profile of its colours, None for sRGB."""
    if not profile:
        return image.convert("RGB"), ()
    try:
        from PIL import ImageCms

        # Its palette has the colours.
        image = image.convert("RGB") if image.mode in ("P", "RGBA", "LA") else image
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" in ImageCms.getProfileDescription(own).lower():
            return image.convert("RGB"), ()
        made = ImageCms.profileToProfile(image, own, ImageCms.createProfile("sRGB"), outputMode="RGB")
    # Any exception: a profile is a program of tables, and Pillow may be built without what reads it.
    except Exception as error:
        return image.convert("RGB"), (f"its colour profile is not used: {first_line(error)}",)
    return made, ("its colours were converted from their own profile to sRGB",)


def check_image(path: str, height: int, width: int, field: str = "image_path") -> None:
    """Whether a file is an image that a clip of height x width pixels can start from or end with. field: of the
    request, for messages.

    Raises RequestError for what `open_picture` refuses, and for sides of another ratio.
    """
    columns, rows = open_picture(path, field).size
    stretch = (columns / rows) / (width / height)
    if not 1 - MAX_STRETCH <= stretch <= 1 / (1 - MAX_STRETCH):
        raise RequestError(
            f"{field}: {path} is {columns} x {rows} (width x height), the clip {width} x {height}: the ratio of "
            "the sides must agree within 10 %. Crop the image, or set --height and --width to fit it"
        )


def read_image(path: str, height: int, width: int) -> numpy.typing.NDArray[numpy.uint8]:
    """The pixels of an image that `check_image` passed, [height, width, 3], uint8, scaled by Lanczos' filter."""
    from PIL import Image

    scaled = open_picture(path).resize((width, height), Image.Resampling.LANCZOS)
    return numpy.array(scaled, dtype=numpy.uint8)


def _is_transparent(image: Any) -> bool:
    """Whether a Pillow image has a pixel that is not opaque."""
    if image.mode.startswith("I"):
        return "transparency" in image.info
    if "A" not in image.getbands() and "a" not in image.getbands() and "transparency" not in image.info:
        return False
    return bool(image.convert("RGBA").getchannel("A").getextrema()[0] < 255)


def _eight_bits(image: Any) -> Any:
    """16-bit grey as 8-bit grey: Pillow's own conversion clips every value at 255 and leaves white."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((numpy.asarray(image).astype(numpy.float64) / 257).round().clip(0, 255).astype(numpy.uint8))
