"""Images that a program gives as values, encoded bytes or Pillow images, as files: all else reads paths.

The files are in a folder that this user alone can read, one per content, until the process ends.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tempfile
from pathlib import Path
from typing import Any

# What a PNG can hold of Pillow's modes.
_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


def as_image_paths(value: Any) -> Any:
    """`value`, or each element of a list or tuple, with bytes and Pillow images as the paths of files that hold them;
    anything else as it is. Raises OSError where no temporary file can be written."""
    if isinstance(value, list | tuple):
        return type(value)(as_image_paths(each) for each in value) if not hasattr(value, "_fields") else value
    if isinstance(value, bytes | bytearray):
        return _stored(bytes(value))
    # Pillow is not imported to see that a path is none of its images.
    if callable(getattr(value, "save", None)) and hasattr(value, "mode") and hasattr(value, "getexif"):
        return _stored(_encoded(value))
    return value


def _encoded(image: Any) -> bytes:
    """A Pillow image as a PNG without loss, with its orientation and colour profile."""
    kept = image if image.mode in _MODES else image.convert("RGB")
    content = io.BytesIO()
    kept.save(content, "PNG", exif=image.getexif(), icc_profile=image.info.get("icc_profile"))
    return content.getvalue()


def _stored(content: bytes) -> str:
    path = Path(_folder().name) / hashlib.sha256(content).hexdigest()
    if not path.exists():
        path.write_bytes(content)
    return str(path)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="diffusion_runtime_images_")
