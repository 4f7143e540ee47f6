"""The decoder of an image autoencoder whose latents are scaled and shifted by one number each, as in diffusers."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import LatentDecoder

AUTOENCODER = DiffusersComponent(COMPONENT, "diffusers.models.autoencoders.autoencoder_kl", "AutoencoderKL")


class ImageDecoder(LatentDecoder):
    """AutoencoderKL's decoder. Computes in its weights' dtype.

    scale, shift: latents are (raw - shift) * scale.
    """

    library = "diffusers"

    def __init__(self, autoencoder: Any, scale: float, shift: float) -> None:
        self._autoencoder = autoencoder
        self._scale = scale
        self._shift = shift
        self.implementation = type(autoencoder).__name__

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode; the normalisation is undone in float32, whatever dtype the decoder computes in."""
        weight = next(self._autoencoder.parameters())
        raw = latents.squeeze(2).to(weight.device, torch.float32) / self._scale + self._shift
        return decode_image(self._autoencoder, raw.to(weight.dtype))


def decode_image(autoencoder: Any, raw: torch.Tensor) -> torch.Tensor:
    """Decode to frames as of LatentDecoder.decode. raw: latents without normalisation, [batch, channels, height,
    width], in the autoencoder's dtype."""
    with torch.inference_mode():
        image: torch.Tensor = autoencoder.decode(raw, return_dict=False)[0]
        return image.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0).permute(0, 2, 3, 1)[:, None].contiguous()


def load_image_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> ImageDecoder:
    """Load the decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    scale, shift = read_normalisation(folder)
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    return ImageDecoder(autoencoder, scale, shift)


def read_normalisation(folder: AnyFolder) -> tuple[float, float]:
    """Read (scale, shift) of ImageDecoder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, COMPONENT)
    return file.number("scaling_factor"), file.number("shift_factor")
