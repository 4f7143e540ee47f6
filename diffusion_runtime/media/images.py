"""Reads the input images of a generation; files may be untrusted."""

from __future__ import annotations

import functools
import io
import os
import warnings
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from diffusion_runtime.errors import RequestError, first_line
from diffusion_runtime.media.recompression import check_recompression, recompress
from diffusion_runtime.untrusted.files import check_file

MAX_IMAGE_BYTES = 512 * 1024 * 1024
# Pillow refuses twice its own limit of 89 megapixels by itself; phones take up to 200.
MAX_PIXELS = 170_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# By how many of 256 levels colours of sRGB may differ after a conversion to sRGB.
_ROUNDING = 2
# Greys of a mask from this on are white.
WHITE = 128
# Fewer pixels a side than one latent of a video model's autoencoder stands for.
_SMALL = 16
# How far the ratio of the sides may be from the clip's: a smaller difference is not visible as stretching.
MAX_STRETCH = 0.1


def open_picture(path: str, field: str = "image_path") -> Any:
    """Open an image file as Pillow's RGB image of its own size, turned upright by its EXIF orientation.

    Grey, palette, CMYK and 16-bit images are converted, and colours of another profile to sRGB; of an animation it is
    the first frame. field: of the request, for messages. Raises RequestError for a file that is missing, damaged or no
    image, and for one with transparent parts: the background behind them is not defined.
    """
    return _read(path, field)[0]


@dataclass(frozen=True)
class PictureFacts:
    """Facts that `open_picture` finds in a file. size: width and height of the image. remarks: what of the file is not
    used as it is, as sentences. brightest: the highest grey level, 0 to 255."""

    size: tuple[int, int]
    remarks: tuple[str, ...]
    brightest: int


def inspect_picture(path: str, field: str = "image_path") -> PictureFacts:
    """Return what is in an image file, which is decoded once for all checks of one field. Raises what `open_picture`
    raises."""
    state = os.stat(check_file(path, field, max_bytes=MAX_IMAGE_BYTES, error=RequestError))
    return _inspected(path, field, (state.st_ino, state.st_size, state.st_mtime_ns))


def picture_remarks(path: str, field: str) -> tuple[str, ...]:
    """Return what of an image file is not used as it is, as sentences. Raises what `open_picture` raises."""
    return tuple(f"{field}: {path}: {remark}" for remark in inspect_picture(path, field).remarks)


# A dry run, the checks of every prompt and the pipeline ask again and again; a changed file is another entry.
@functools.lru_cache(maxsize=256)
def _inspected(path: str, field: str, _state: tuple[int, ...]) -> PictureFacts:
    picture, remarks = _read(path, field)
    return PictureFacts(picture.size, remarks, picture.convert("L").getextrema()[1])


def _read(path: str, field: str) -> tuple[Any, tuple[str, ...]]:
    """Read the image and remarks on it."""
    from PIL import Image, UnidentifiedImageError

    source = check_file(path, field, max_bytes=MAX_IMAGE_BYTES, error=RequestError)
    try:
        with warnings.catch_warnings(record=True) as caught:
            # Its limit of 89 megapixels is below what phones take; ours follows, before a pixel is decoded.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            with Image.open(source, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise UnfitPicture(
                        f"has {image.width} x {image.height} pixels, more than {MAX_PIXELS}; scale it down"
                    )
                is_animated = bool(getattr(image, "is_animated", False))
                image.seek(0)
                converted, remarks = frame_in_srgb(image)
    except UnfitPicture as error:
        raise RequestError(f"{field}: {source} {error}") from error
    except Exception as error:  # any exception: a decoder may raise anything on untrusted bytes
        is_other = isinstance(error, UnidentifiedImageError)
        advice = "save it, or a frame of it, as PNG" if is_other else "copy it again, or save it as PNG"
        if isinstance(error, Image.DecompressionBombError):
            advice = "scale it down"
        raise RequestError(
            f"{field}: {source} is not a readable {', '.join(FORMATS)} image: {first_line(error)}; {advice}"
        ) from error
    # Such as damaged EXIF data, whose orientation is then not known.
    warned = dict.fromkeys(f"Pillow warns: {first_line(UserWarning(str(each.message)))}" for each in caught)
    first = ("it is animated: its first frame is used",) if is_animated else ()
    sides = f"{converted.width} x {converted.height} pixels (width x height)"
    small = (f"it has {sides}, and is scaled up",) if min(converted.size) < _SMALL else ()
    return converted, (*remarks, *warned, *first, *small)


class UnfitPicture(ValueError):
    """Fault of a readable picture that makes it unusable, worded to follow the name of its file."""


def frame_in_srgb(frame: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the frame that a Pillow image is at, upright and as 8 bits of sRGB, and remarks. Raises UnfitPicture for
    transparent parts."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(frame)
    if _is_transparent(upright):
        raise UnfitPicture("has transparent parts; put it on a background, and save it without transparency")
    return _in_srgb(_eight_bits(upright), frame.info.get("icc_profile"))


def _in_srgb(image: Any, profile: bytes | None) -> tuple[Any, tuple[str, ...]]:
    """Convert a Pillow image to sRGB; return it and remarks. profile: the ICC profile of its colours, None for sRGB."""
    if not profile:
        return image.convert("RGB"), ()
    try:
        from PIL import ImageCms

        # Its palette has the colours.
        image = image.convert("RGB") if image.mode in ("P", "RGBA", "LA") else image
        own, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        if image.mode == "RGB" and _is_srgb(own, srgb):
            return image, ()
        made = ImageCms.profileToProfile(image, own, srgb, outputMode="RGB")
    # Any exception: a profile is a program of tables, and Pillow may be built without what reads it.
    except Exception as error:
        return image.convert("RGB"), (f"its colour profile is not used: {first_line(error)}",)
    return made, ("its colours were converted from their own profile to sRGB",)


def _is_srgb(profile: Any, srgb: Any) -> bool:
    """Return True if an RGB profile leaves colours unchanged up to rounding, whatever its name: some profiles with sRGB
    in their description are linear, or of other primaries."""
    from PIL import Image, ImageCms

    levels = numpy.arange(0, 256, 15, dtype=numpy.uint8)
    sample = Image.fromarray(numpy.stack(numpy.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3))
    made = ImageCms.profileToProfile(sample, profile, srgb, outputMode="RGB")
    difference = numpy.asarray(made).astype(int) - numpy.asarray(sample).astype(int)
    return bool(numpy.abs(difference).max() <= _ROUNDING)


def check_image(path: str, height: int, width: int, field: str = "image_path", *, crf: int = 0) -> None:
    """Check that a clip of height x width pixels can start from or end with an image file. field: of the request, for
    messages. crf: as in read_image.

    Raises RequestError for what `open_picture` refuses, for sides of another ratio, and for some that H.264 has not.
    """
    columns, rows = inspect_picture(path, field).size
    if crf:
        check_recompression(columns, rows, path, field)
    stretch = (columns / rows) / (width / height)
    if not 1 - MAX_STRETCH <= stretch <= 1 / (1 - MAX_STRETCH):
        turned = ", turned upright by its EXIF orientation" if _is_turned(path) else ""
        raise RequestError(
            f"{field}: {path} is {columns} x {rows} (width x height{turned}), the clip {width} x {height}: the ratio "
            "of the sides must agree within 10 %. Crop the image, or set --height and --width to fit it"
        )


def _is_turned(path: str) -> bool:
    """Return True if turning an image upright, which `open_picture` read, swaps the rows and columns of its file."""
    from PIL import ExifTags, Image

    with Image.open(path, formats=FORMATS) as image:
        return image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)


def read_image(path: str, height: int, width: int, *, crf: int = 0) -> numpy.typing.NDArray[numpy.uint8]:
    """Read the pixels of an image that `check_image` passed, [height, width, 3], uint8, scaled by Lanczos' filter. crf:
    of the H.264 frame that it is before, at its own size; 0 for none."""
    from PIL import Image

    picture = open_picture(path)
    if crf:
        picture = Image.fromarray(recompress(numpy.array(picture, dtype=numpy.uint8), crf))
    scaled = picture.resize((width, height), Image.Resampling.LANCZOS)
    return numpy.array(scaled, dtype=numpy.uint8)


def check_mask(path: str, image_path: str, field: str = "mask_path") -> None:
    """Check that a file is a mask of an image: of its size, with something to repaint. Raises RequestError if it is
    not, and for what `open_picture` refuses."""
    mask, image = inspect_picture(path, field), inspect_picture(image_path)
    if mask.size != image.size:
        raise RequestError(
            f"{field}: {path} is {mask.size[0]} x {mask.size[1]} (width x height), and its image {image_path} "
            f"{image.size[0]} x {image.size[1]}; expected a mask of the image's size"
        )
    if mask.brightest < WHITE:
        raise RequestError(f"{field}: {path} is black, so that nothing would be repainted; white is what is repainted")


def read_mask(path: str, height: int, width: int, field: str = "mask_path") -> numpy.typing.NDArray[numpy.bool_]:
    """Read the mask that `check_mask` passed, [height, width]: whether a pixel is repainted; scaled by Lanczos' filter,
    and white from the middle grey on."""
    from PIL import Image

    scaled = open_picture(path, field).resize((width, height), Image.Resampling.LANCZOS).convert("L")
    return numpy.asarray(scaled) >= WHITE


def _is_transparent(image: Any) -> bool:
    """Return True if a Pillow image has a pixel that is not opaque."""
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
