"""Images that come with a request: their size by their header, before anything is decoded."""

from __future__ import annotations

import io
import warnings

from diffusion_runtime.errors import RequestError
from diffusion_runtime.untrusted.image_urls import image_kind


def check_image(field: str, content: bytes, max_pixels: int) -> str:
    """Return the extension of an image. Raises RequestError for what is no PNG, JPEG or WebP and for one of more than
    max_pixels."""
    kind, extension = image_kind(field, content)
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=(kind,)) as image:
                width, height = image.size
    # Any exception: a decoder may raise anything on untrusted bytes.
    except Exception as error:
        raise RequestError(f"{field}: the image is damaged: {type(error).__name__}") from error
    if width * height > max_pixels:
        raise RequestError(f"{field}: the image has {width} x {height} pixels, at most {max_pixels} are taken")
    return extension
