"""Clips as a page shows them: H.264 for videos, WebP for images, without recipe and sound."""

from __future__ import annotations

import dataclasses

from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.media.ffmpeg_program import find_ffmpeg
from diffusion_runtime.request.generation_request import GenerationRequest


def check_encoder(request: GenerationRequest) -> None:
    """Raises MissingPackageError where the page of a resolved request's clip needs ffmpeg, and there is none."""
    if (request.num_frames or 1) > 1:
        find_ffmpeg("the page of videos (--html)", "leave the page out")


def encode_picture(media: GeneratedMedia) -> tuple[bytes, str]:
    """Return the encoded bytes and their media type. Raises OutputError where the temporary folder has no room, and
    MissingPackageError as `check_encoder`."""
    file_format, kind = ("mp4", "video/mp4") if media.num_frames > 1 else ("webp", "image/webp")
    # A recipe names folders of this machine, and the page is made to be handed on.
    return dataclasses.replace(media, recipe={}, audio=None).to_bytes(file_format), kind
