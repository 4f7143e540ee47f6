"""The Wan autoencoder as diffusers computes it: its decoder behind LatentDecoder, its encoder for a first image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.model_folder import read_config
from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner, LatentDecoder

AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "AutoencoderKLWan",
    {"clip_output": "no version of the class has read it: what it decodes is always cut to [-1, 1]"},
)

# The halves of the autoencoder; the one that is not needed is neither built nor read.
_ENCODER_PARTS = ("encoder", "quant_conv")
_DECODER_PARTS = ("decoder", "post_quant_conv")


class WanDecoder(LatentDecoder):
    """AutoencoderKLWan's decoder. Computes in its weights' dtype."""

    library = "diffusers"
    splits_rows = True

    def __init__(self, autoencoder: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        weight = next(autoencoder.parameters())
        self._autoencoder = autoencoder
        self._mean = torch.tensor(mean, device=weight.device).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(std, device=weight.device).view(1, -1, 1, 1, 1)
        self._dtype = weight.dtype
        self.implementation = type(autoencoder).__name__

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See LatentDecoder.decode. The normalisation is undone in float32, whatever the decoder computes in."""
        raw = latents.to(self._mean.device, torch.float32) * self._std + self._mean
        with torch.inference_mode(), OneDnnConvolutions():
            frames: torch.Tensor = self._autoencoder.decode(raw.to(self._dtype), return_dict=False)[0]
            return frames.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0).permute(0, 2, 3, 4, 1).contiguous()


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


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> WanDecoder:
    """The decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    return WanDecoder(*_load_half(folder, device, dtype, left_out=_ENCODER_PARTS))


def load_image_conditioner(folder: Path, device: torch.device, dtype: torch.dtype) -> WanImageConditioner:
    """The encoder of a diffusers folder's `vae`. Raises what load_decoder raises."""
    return WanImageConditioner(*_load_half(folder, device, dtype, left_out=_DECODER_PARTS))


def read_statistics(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the latents, of every channel. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, COMPONENT)
    num_channels = file.whole_number("z_dim", 16)
    return file.numbers("latents_mean", num_channels), file.numbers("latents_std", num_channels)


def _load_half(
    folder: Path, device: torch.device, dtype: torch.dtype, *, left_out: tuple[str, ...]
) -> tuple[Any, tuple[float, ...], tuple[float, ...]]:
    """The autoencoder without these parts, and the mean and deviation of its latents."""
    mean, std = read_statistics(folder)
    return AUTOENCODER.load(folder, device, dtype, left_out=left_out), mean, std
