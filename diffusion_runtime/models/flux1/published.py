"""The published FLUX.1 text-to-image models."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

# CLIP-L, T5-XXL's encoder, and the autoencoder of both.
_REST = (("text_encoder", 0.123), ("text_encoder_2", 4.762), ("vae", 0.084))

PUBLISHED = (
    PublishedModel("flux.1-dev", "flux1", "black-forest-labs/FLUX.1-dev", "image", (("transformer", 11.901), *_REST)),
    # Without the network for the guidance scale.
    PublishedModel(
        "flux.1-schnell", "flux1", "black-forest-labs/FLUX.1-schnell", "image", (("transformer", 11.891), *_REST)
    ),
)
