"""The published Wan models, and the one of that architecture that ships inside the package."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

# UMT5-XXL's encoder.
_TEXT = ("text_encoder", 5.68)

PUBLISHED = (
    PublishedModel(
        "shapes",
        "wan",
        "shapes",
        "video",
        (("transformer", 0.00699), ("text_encoder", 0.00034), ("vae", 0.00099)),
    ),
    PublishedModel(
        "wan2.1-1.3b",
        "wan",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "video",
        (("transformer", 1.419), _TEXT, ("vae", 0.127)),
        stored_bytes=4,
    ),
    PublishedModel(
        "wan2.2-ti2v-5b",
        "wan",
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "video from text or image",
        (("transformer", 5.0), _TEXT, ("vae", 0.705)),
    ),
    PublishedModel(
        "wan2.2-t2v-a14b",
        "wan",
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "video",
        (("transformer", 14.289), ("transformer_2", 14.289), _TEXT, ("vae", 0.127)),
    ),
)
