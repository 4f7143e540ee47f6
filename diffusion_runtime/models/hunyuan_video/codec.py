"""The HunyuanVideo autoencoder's decoder, as diffusers computes it, behind LatentDecoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.model_folder import read_config
from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.interface import LatentDecoder

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_hunyuan_video", "AutoencoderKLHunyuanVideo"
)


class HunyuanVideoDecoder(LatentDecoder):
    """AutoencoderKLHunyuanVideo's decoder. Computes in its weights' dtype.

    As its authors run it, it decodes 17 frames of at most 256 x 256 pixels at a time and blends what overlaps.
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


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> HunyuanVideoDecoder:
    """The decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    return HunyuanVideoDecoder(autoencoder, read_scaling_factor(folder))


def read_scaling_factor(folder: Path) -> float:
    """What latents are multiplied with. Raises ModelLoadError that names the file and the key."""
    return read_config(folder, COMPONENT).number("scaling_factor", 0.476986)
