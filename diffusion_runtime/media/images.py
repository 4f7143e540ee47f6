"""Images that a generation starts from, read from files of strangers."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy
import numpy.typing

from diffusion_runtime.errors import RequestError

FORMATS = ("PNG", "JPEG", "WEBP")
# How far the sides' ratio may be from the clip's: below, nobody sees that the picture was stretched.
MAX_STRETCH = 0.1


def check_image(path: str, height: int, width: int) -> None:
    """Whether a file is an image that a clip of height x width pixels can start from; reads no pixel.

    Raises RequestError for a file that is missing, is no image, or has sides of another ratio.
    """
    from PIL import Image

    source = Path(path)
    if not source.is_file():
        raise RequestError(f"image_path: {source}: {'this is a folder' if source.is_dir() else 'no such file'}")
    try:
        with warnings.catch_warnings():
            # A picture of billions of pixels in a few bytes.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source, formats=FORMATS) as image:
                columns, rows = image.size
    except Exception as error:  # a stranger's bytes may upset a decoder in any way it knows
        raise RequestError(f"image_path: {source} is not a readable {', '.join(FORMATS)} image: {error}") from error
    stretch = (columns / rows) / (width / height)
    if not 1 - MAX_STRETCH <= stretch <= 1 / (1 - MAX_STRETCH):
        raise RequestError(
            f"image_path: {source} is {columns} x {rows} (width x height), the clip {width} x {height}: the ratio of "
            "the sides must agree within 10 %. Crop the image, or set --height and --width to fit it"
        )


def read_image(path: str, height: int, width: int) -> numpy.typing.NDArray[numpy.uint8]:
    """The pixels of an image that `check_image` passed, [height, width, 3], uint8, scaled by Lanczos' filter."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            scaled = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
            return numpy.array(scaled, dtype=numpy.uint8)
    except OSError as error:
        raise RequestError(f"image_path: {path} cannot be read: {error}") from error
