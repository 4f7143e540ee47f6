"""Generated frames and sound, and the files (mp4, gif, webp, png, npy, wav) they are written to, each with its
recipe."""

from __future__ import annotations

from diffusion_runtime.media.audio import Audio
from diffusion_runtime.media.file_writer import ClipHeader, FileWriter
from diffusion_runtime.media.formats import FORMATS, SOUND_FORMATS, check_format, check_writable, format_of
from diffusion_runtime.media.generated import GeneratedMedia
from diffusion_runtime.media.publish import numbered
from diffusion_runtime.media.reading import MediaFile, has_sound_beside, read_media_file, read_own_sidecar, read_recipe
from diffusion_runtime.media.sidecar import RECIPE_SCHEMA, SIDECAR_SCHEMA

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
