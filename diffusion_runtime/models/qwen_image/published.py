"""The published Qwen-Image models."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

PUBLISHED = (
    PublishedModel(
        "qwen-image",
        "qwen_image",
        "Qwen/Qwen-Image",
        "image",
        (("transformer", 20.430), ("text_encoder", 8.292), ("vae", 0.127)),
    ),
)
