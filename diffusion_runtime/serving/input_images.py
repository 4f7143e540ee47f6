"""Images that come with a request: their size by their header, before anything is decoded; where an engine finds
them."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def refuse_elsewhere(request: Mapping[str, Any], inputs: Path | None) -> None:
    """Raises RequestError for a request that names a file outside the folder of inputs, where there is one.
    The server writes all of them there; an engine that checks it reads no other file of its machine, whoever speaks to
    it."""
    if inputs is None:
        return
    for name, value in request.items():
        for path in [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
            if name.endswith("_path") and os.path.realpath(path) != os.path.join(
                os.path.realpath(inputs), os.path.basename(str(path))
            ):
                raise RequestError(f"{name}: names a file that did not come with the request")
