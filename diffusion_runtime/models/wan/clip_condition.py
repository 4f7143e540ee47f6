"""The condition next to the latents in Wan's image-to-video models (I2V, FLF2V): a clip of the known frames, and a
mask.

The clip is the first image, zeros (grey) up to the end, and the last image where there is one, encoded like a video of
its length. The mask has a channel for each frame of a latent frame: 1 where the frame is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.interface import FrameConditioner, ImageCondition
from diffusion_runtime.models.wan.codec import WanImageConditioner, as_pixels, load_image_conditioner
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.text_encoders.clip import ClipImageEncoder, load_clip_image_encoder


class WanClipConditioner(FrameConditioner):
    """Conditioner of a clip. encoder: of clips. temporal_factor: frames of a latent frame. tokens: the image encoder of
    Wan 2.1, None where a model has none."""

    def __init__(
        self, encoder: WanImageConditioner, temporal_factor: int, tokens: ClipImageEncoder | None = None
    ) -> None:
        self._encoder = encoder
        self._temporal_factor = temporal_factor
        self._tokens = tokens

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        if self._tokens is None:
            return self._encoder.libraries
        return (
            *self._encoder.libraries,
            LibraryAttention("image_encoder", self._tokens.library, self._tokens.implementation),
        )

    def fast(self) -> WanClipConditioner:
        return WanClipConditioner(self._encoder.fast(), self._temporal_factor, self._tokens)

    def encode(self, image: torch.Tensor, size: ClipSize, last_image: torch.Tensor | None = None) -> ImageCondition:
        frames = torch.zeros(3, size.num_frames, *image.shape[:2])
        frames[:, 0] = as_pixels(image)
        if last_image is not None:
            frames[:, -1] = as_pixels(last_image)
        latents = self._encoder.encode_frames(frames)
        # The first latent frame is one frame, which fills all of its channels.
        mask = latents.new_zeros(1, self._temporal_factor, *latents.shape[2:])
        mask[:, :, 0] = 1.0
        if last_image is not None:
            mask[:, -1, -1] = 1.0
        return ImageCondition(torch.cat([mask, latents], dim=1))

    def embed(self, pictures: Iterator[torch.Tensor]) -> torch.Tensor | None:
        """Embed the images. The tokens of the last image follow those of the first."""
        if self._tokens is None:
            return None
        return torch.cat([self._tokens.encode(picture) for picture in pictures], dim=1)


def load_clip_conditioner(
    folder: AnyFolder, device: torch.device, dtype: torch.dtype, *, temporal_factor: int, has_tokens: bool
) -> WanClipConditioner:
    """Load a diffusers folder's `vae` encoder, and with has_tokens its `image_encoder`. Raises ModelLoadError."""
    tokens = load_clip_image_encoder(folder, device, dtype) if has_tokens else None
    encoder = load_image_conditioner(folder, device, dtype, one_frame=False)
    return WanClipConditioner(encoder, temporal_factor, tokens)
