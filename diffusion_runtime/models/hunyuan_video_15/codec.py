"""The HunyuanVideo-1.5 autoencoder as diffusers computes it: its decoder behind LatentDecoder, its encoder for a first
image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.model_folder import read_config
from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.interface import LatentDecoder

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15", "AutoencoderKLHunyuanVideo15"
)


class HunyuanVideo15Decoder(LatentDecoder):
    """AutoencoderKLHunyuanVideo15's decoder. Computes in its weights' dtype.

    As its authors run it, it decodes at most 256 x 256 pixels at a time and blends what overlaps.
    """

    library = "diffusers"

    def __init__(self, autoencoder: Any, scaling_factor: float) -> None:
        autoencoder.enable_tiling()
        weight = next(autoencoder.parameters())
        self._autoencoder = autoencoder
        self._scaling_factor = scaling_factor
        self._device = weight.device
        self._dtype = weight.dtype
        self.implementation = type(autoencoder).__name__

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See LatentDecoder.decode. The scaling is undone in float32, whatever the decoder computes in."""
        raw = latents.to(self._device, torch.float32) / self._scaling_factor
        with torch.inference_mode(), OneDnnConvolutions():
            frames: torch.Tensor = self._autoencoder.decode(raw.to(self._dtype), return_dict=False)[0]
            return frames.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0).permute(0, 2, 3, 4, 1).contiguous()


class FirstFrameEncoder:
    """AutoencoderKLHunyuanVideo15's encoder: an image as the first latent frame of a video."""

    def __init__(self, autoencoder: Any, scaling_factor: float) -> None:
        self._autoencoder = autoencoder
        self._scaling_factor = scaling_factor

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """image: [height, width, 3], uint8. Latents [1, channels, 1, height, width], float32: the most likely ones."""
        weight = next(self._autoencoder.parameters())
        pixels = image.to(weight.device, torch.float32).div(255).mul(2).sub(1).permute(2, 0, 1)[None, :, None]
        with torch.inference_mode(), OneDnnConvolutions():
            mode: torch.Tensor = self._autoencoder.encode(pixels.to(weight.dtype)).latent_dist.mode()
        return mode.float() * self._scaling_factor


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> HunyuanVideo15Decoder:
    """The decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    return HunyuanVideo15Decoder(_load_half(folder, device, dtype, left_out="encoder"), read_scaling_factor(folder))


def load_encoder(folder: Path, device: torch.device, dtype: torch.dtype) -> FirstFrameEncoder:
    """The encoder of a diffusers folder's `vae`. Raises what load_decoder raises."""
    return FirstFrameEncoder(_load_half(folder, device, dtype, left_out="decoder"), read_scaling_factor(folder))


def read_scaling_factor(folder: Path) -> float:
    """What latents are multiplied with. Raises ModelLoadError that names the file and the key."""
    return read_config(folder, COMPONENT).number("scaling_factor", 1.03682)


def _load_half(folder: Path, device: torch.device, dtype: torch.dtype, *, left_out: str) -> Any:
    return AUTOENCODER.load(folder, device, dtype, left_out=(left_out,))
