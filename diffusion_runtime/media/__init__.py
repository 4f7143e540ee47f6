"""Generated frames and sound, and the files (mp4, gif, webp, png, npy, wav) they are written to, each with its
recipe. The names below are imported when they are first used: programs that write text alone need no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusion_runtime.media.audio import Audio
    from diffusion_runtime.media.file_writer import ClipHeader, FileWriter
    from diffusion_runtime.media.formats import FORMATS, SOUND_FORMATS, check_format, check_writable, format_of
    from diffusion_runtime.media.generated import GeneratedMedia
    from diffusion_runtime.media.publish import numbered
    from diffusion_runtime.media.reading import (
        MediaFile,
        has_sound_beside,
        read_media_file,
        read_own_sidecar,
        read_recipe,
    )
    from diffusion_runtime.media.sidecar import RECIPE_SCHEMA, SIDECAR_SCHEMA

_HOMES = {
    "Audio": "audio",
    "check_format": "formats",
    "check_writable": "formats",
    "ClipHeader": "file_writer",
    "FileWriter": "file_writer",
    "format_of": "formats",
    "FORMATS": "formats",
    "GeneratedMedia": "generated",
    "has_sound_beside": "reading",
    "MediaFile": "reading",
    "numbered": "publish",
    "read_media_file": "reading",
    "read_own_sidecar": "reading",
    "read_recipe": "reading",
    "RECIPE_SCHEMA": "sidecar",
    "SIDECAR_SCHEMA": "sidecar",
    "SOUND_FORMATS": "formats",
}

__all__ = [
    "FORMATS",
    "RECIPE_SCHEMA",
    "SIDECAR_SCHEMA",
    "SOUND_FORMATS",
    "Audio",
    "ClipHeader",
    "FileWriter",
    "GeneratedMedia",
    "MediaFile",
    "check_format",
    "check_writable",
    "format_of",
    "has_sound_beside",
    "numbered",
    "read_media_file",
    "read_own_sidecar",
    "read_recipe",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'diffusion_runtime.media' has no attribute {name!r}")
    return getattr(importlib.import_module(f"diffusion_runtime.media.{_HOMES[name]}"), name)
