"""The published Z-Image models."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

PUBLISHED = (
    PublishedModel(
        "z-image-turbo",
        "z_image",
        "Tongyi-MAI/Z-Image-Turbo",
        "image",
        (("transformer", 6.155), ("text_encoder", 4.022), ("vae", 0.084)),
    ),
)
