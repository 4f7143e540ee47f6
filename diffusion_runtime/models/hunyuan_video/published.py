"""The published HunyuanVideo model."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

PUBLISHED = (
    PublishedModel(
        "hunyuan-video",
        "hunyuan_video",
        "hunyuanvideo-community/HunyuanVideo",
        "video",
        (("transformer", 12.821), ("text_encoder", 7.505), ("text_encoder_2", 0.123), ("vae", 0.246)),
    ),
)
