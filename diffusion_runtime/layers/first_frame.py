"""The image that a video starts from, in its latents or next to them (image conditioning: token replace, latent
concat).

Shapes: latents [batch, channels, frames, height, width]; image [batch, channels, 1, height, width], normalised as they.
"""

from __future__ import annotations

import torch


def in_first_frame(latents: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Return the latents with the image as their first frame, a new tensor (token replace)."""
    return torch.cat([image.to(latents.device, latents.dtype), latents[:, :, 1:]], dim=2)


def beside_latents(latents: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
    """Latents, behind them the image as the first of as many frames, the others zero, and a channel that is one where
    it is: [batch, 2 channels + 1, frames, height, width] (latent concat). Without an image all of that is zero."""
    batch, num_channels, *sizes = latents.shape
    whole = latents.new_zeros(batch, 2 * num_channels + 1, *sizes)
    whole[:, :num_channels] = latents
    if image is not None:
        whole[:, num_channels:-1, :1] = image
        whole[:, -1, 0] = 1.0
    return whole
