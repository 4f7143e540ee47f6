"""The published HunyuanVideo-1.5 models at 480p; those at 720p are as large."""

from __future__ import annotations

from diffusion_runtime.models.published import PublishedModel

_SHARED = (("transformer", 8.327), ("text_encoder", 7.071), ("text_encoder_2", 0.219), ("vae", 1.261))
_HUB = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p"

PUBLISHED = (
    PublishedModel("hunyuan-video-1.5-t2v", "hunyuan_video_15", f"{_HUB}_t2v", "video", _SHARED),
    PublishedModel(
        "hunyuan-video-1.5-i2v",
        "hunyuan_video_15",
        f"{_HUB}_i2v",
        "video from image",
        (*_SHARED, ("image_encoder", 0.428)),
    ),
)
