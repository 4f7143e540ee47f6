"""The published FLUX.2 text-to-image models."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

_VAE = ("vae", 0.084)
# Mistral Small 3 with its vision half, Qwen3 4B and 8B: as they are downloaded. A quarter of each is not read.
_MISTRAL, _QWEN_4B, _QWEN_8B = ("text_encoder", 24.011), ("text_encoder", 4.022), ("text_encoder", 8.191)

PUBLISHED = (
    PublishedModel(
        "flux.2-dev", "flux2", "black-forest-labs/FLUX.2-dev", "image", (("transformer", 32.223), _MISTRAL, _VAE)
    ),
    PublishedModel(
        "flux.2-klein-4b",
        "flux2",
        "black-forest-labs/FLUX.2-klein-4B",
        "image",
        (("transformer", 3.876), _QWEN_4B, _VAE),
    ),
    PublishedModel(
        "flux.2-klein-9b",
        "flux2",
        "black-forest-labs/FLUX.2-klein-9B",
        "image",
        (("transformer", 9.079), _QWEN_8B, _VAE),
    ),
)
