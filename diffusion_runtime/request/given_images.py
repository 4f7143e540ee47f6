"""Images that are given as values (encoded bytes, Pillow images, data: URLs) or by https: addresses, as files: all else
reads paths.

The files are in a folder that this user alone can read, one per content, until the process ends. A recipe holds the
digest of such an image, or its address.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import RequestError, shown
from diffusion_runtime.untrusted.files import read_file
from diffusion_runtime.untrusted.image_urls import data_of_url, fetch_image, image_kind
from diffusion_runtime.untrusted.media_kinds import HEAD_BYTES, container_of

# What a PNG can hold of Pillow's modes.
_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
# What a recipe holds of an image that was a value; the digest follows.
_DIGEST = "data:sha256:"
_ADDRESSES = ("https://", "http://")


def as_image_paths(value: Any) -> Any:
    """Return `value`, or each element of a list or tuple, with bytes, Pillow images and data: URLs as the paths of
    files that hold them; anything else as it is. Raises OSError where no temporary file can be written."""
    if isinstance(value, list | tuple):
        return type(value)(as_image_paths(each) for each in value) if not hasattr(value, "_fields") else value
    if isinstance(value, bytes | bytearray):
        return _stored(bytes(value))
    if isinstance(value, str) and value.startswith("data:") and not value.startswith(_DIGEST):
        try:
            return _of_data("", value)
        except RequestError:
            # check_given, which knows the field's name, refuses it.
            return value
    # Pillow is not imported to see that a path is none of its images.
    if callable(getattr(value, "save", None)) and hasattr(value, "mode") and hasattr(value, "getexif"):
        return _stored(_encoded(value))
    return value


def as_media_paths(value: Any) -> Any:
    """Return `as_image_paths` of media files of any kind, whose stored files end as their content does: their readers
    go by the name. Raises OSError where no temporary file can be written."""
    if isinstance(value, list | tuple):
        return type(value)(map(as_media_paths, value))
    if isinstance(value, str) and value.startswith("data:") and not value.startswith(_DIGEST):
        try:
            value = data_of_url("", value)
        except RequestError:
            # check_given, which knows the field's name, refuses it.
            return value
    if isinstance(value, bytes | bytearray):
        content = bytes(value)
        return _stored(content, container_of(content[:HEAD_BYTES]) or "")
    return as_image_paths(value)


def check_given(field: str, path: str) -> None:
    """Check that the path of an image is none of the texts that stand for one: a data: URL that holds no image, a
    recipe's digest, an address that nobody fetched. Raises RequestError."""
    if path.startswith(_DIGEST):
        raise RequestError(
            f"{field}: the recipe was made with an image that was given as data, and holds its digest alone "
            f"({shown(path)}): give the image again, by the flag or key {field}"
        )
    if path.startswith("data:"):
        _of_data(field, path)
    if path.startswith(_ADDRESSES):
        raise RequestError(
            f"{field}: {shown(path)}: `generate` fetches an image from hosts of --allow-url; in Python give its bytes"
        )


def fetched_images(field: str, value: Any, hosts: Sequence[str]) -> Any:
    """Return the value of a field, or each element of a list or tuple, with http addresses as the paths of files that
    were fetched from them, each once per process. Raises RequestError for what cannot or may not be fetched."""
    if isinstance(value, list | tuple):
        return type(value)(fetched_images(field, each, hosts) for each in value)
    return _of_address(field, value, tuple(hosts)) if isinstance(value, str) and value.startswith(_ADDRESSES) else value


def recorded_images(value: Any) -> Any:
    """Return the value of a field, or each element of a list or tuple, as a recipe holds it: an image that was a value
    by its digest, one that was fetched by its address, and anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(recorded_images, value))
    return _recorded(value) if isinstance(value, str) else value


def _recorded(path: str) -> str:
    place = Path(path)
    if _folder.cache_info().currsize == 0 or place.parent != Path(_folder().name):
        return path
    address = place.with_suffix(".url")
    return read_file(address, max_bytes=2**16).decode() if address.exists() else f"{_DIGEST}{place.stem}"


def _of_data(field: str, url: str) -> str:
    content = data_of_url(field, url)
    image_kind(field, content)
    return _stored(content)


@functools.cache
def _of_address(field: str, url: str, hosts: tuple[str, ...]) -> str:
    content = fetch_image(field, url, hosts, "--allow-url {host} allows it, or download the image")
    image_kind(field, content)
    # Of its own name: another address may have the same content.
    path = Path(_folder().name) / hashlib.sha256(url.encode()).hexdigest()
    path.write_bytes(content)
    path.with_suffix(".url").write_text(url)
    return str(path)


def _encoded(image: Any) -> bytes:
    """A Pillow image as a PNG without loss, with its orientation and colour profile."""
    kept = image if image.mode in _MODES else image.convert("RGB")
    content = io.BytesIO()
    kept.save(content, "PNG", exif=image.getexif(), icc_profile=image.info.get("icc_profile"))
    return content.getvalue()


def _stored(content: bytes, suffix: str = "") -> str:
    path = Path(_folder().name) / f"{hashlib.sha256(content).hexdigest()}{suffix}"
    if not path.exists():
        path.write_bytes(content)
    return str(path)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="diffusion_runtime_images_")
