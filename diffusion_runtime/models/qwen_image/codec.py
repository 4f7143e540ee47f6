"""The Qwen-Image autoencoder's decoder, as diffusers computes it, behind LatentDecoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.model_folder import read_config
from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.interface import LatentDecoder

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_qwenimage", "AutoencoderKLQwenImage"
)


class QwenImageDecoder(LatentDecoder):
    """AutoencoderKLQwenImage's decoder, a video autoencoder fine-tuned on images. Computes in its weights' dtype."""

    library = "diffusers"

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


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> QwenImageDecoder:
    """The decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    mean, std = read_statistics(folder)
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    # Its class counts the encoder's convolutions at every decode.
    autoencoder.encoder = torch.nn.Identity()
    return QwenImageDecoder(autoencoder, mean, std)


def read_statistics(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the latents, of every channel. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, COMPONENT)
    num_channels = file.whole_number("z_dim", 16)
    return file.numbers("latents_mean", num_channels), file.numbers("latents_std", num_channels)
