"""The Wan autoencoder as diffusers computes it: its decoder behind LatentDecoder, its encoder for a first image."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.model_folder import AnyFolder
from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.causal_video_decoder import CausalVideoDecoder, exact_decoder
from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.video_decoder import read_statistics, restore_by_config

AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "AutoencoderKLWan",
    {"clip_output": "no version of the class has read it: what it decodes is always cut to [-1, 1]"},
)

# The halves of the autoencoder; the one that is not needed is neither built nor read.
_ENCODER_PARTS = ("encoder", "quant_conv")
_DECODER_PARTS = ("decoder", "post_quant_conv")


class WanImageConditioner(ImageConditioner):
    """AutoencoderKLWan's encoder: an image as the first latent frame of a video."""

    def __init__(self, autoencoder: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        weight = next(autoencoder.parameters())
        self._autoencoder = autoencoder
        self._mean = torch.tensor(mean, device=weight.device).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(std, device=weight.device).view(1, -1, 1, 1, 1)

    def encode(self, image: torch.Tensor, size: ClipSize) -> ImageCondition:
        """See ImageConditioner.encode. The mode of the encoder's distribution, normalised in float32."""
        weight = next(self._autoencoder.parameters())
        pixels = image.to(weight.device, torch.float32).div(127.5).sub(1.0).permute(2, 0, 1)[None, :, None]
        with torch.inference_mode(), OneDnnConvolutions():
            mode = self._autoencoder.encode(pixels.to(weight.dtype)).latent_dist.mode()
        return ImageCondition((mode.float() - self._mean) / self._std)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> CausalVideoDecoder:
    """The decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    restore = restore_by_config(folder, device)
    return exact_decoder(AUTOENCODER.load(folder, device, dtype, left_out=_ENCODER_PARTS), restore)


def load_image_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> WanImageConditioner:
    """The encoder of a diffusers folder's `vae`. Raises what load_decoder raises."""
    mean, std = read_statistics(folder)
    return WanImageConditioner(AUTOENCODER.load(folder, device, dtype, left_out=_DECODER_PARTS), mean, std)
