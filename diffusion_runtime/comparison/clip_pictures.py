"""Clips as a page shows them: H.264 for videos, WebP for images, without recipe and sound."""

from __future__ import annotations

import dataclasses

from diffusion_runtime.media import GeneratedMedia


def encode_picture(media: GeneratedMedia) -> tuple[bytes, str]:
    """The bytes and their media type. Raises OutputError where the temporary folder has no room."""
    file_format, kind = ("mp4", "video/mp4") if media.num_frames > 1 else ("webp", "image/webp")
    # A recipe names folders of this machine, and the page is made to be handed on.
    return dataclasses.replace(media, recipe={}, audio=None).to_bytes(file_format), kind
