"""The decoder of a video autoencoder of diffusers; how latents are normalised is what sets models apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.model_folder import AnyFolder, read_config
from diffusion_runtime.models.autoencoder import COMPONENT
from diffusion_runtime.models.interface import LatentDecoder

# Normalised latents, float32, [batch, channels, frames, height, width] -> those that the autoencoder decodes.
Restore = Callable[[torch.Tensor], torch.Tensor]


class VideoDecoder(LatentDecoder):
    """An autoencoder's decoder. Computes in its weights' dtype."""

    library = "diffusers"

    def __init__(self, autoencoder: Any, restore: Restore) -> None:
        weight = next(autoencoder.parameters())
        self._autoencoder = autoencoder
        self._restore = restore
        self._device = weight.device
        self._dtype = weight.dtype
        self.implementation = type(autoencoder).__name__

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See LatentDecoder.decode. The normalisation is undone in float32, whatever the decoder computes in."""
        with torch.inference_mode(), OneDnnConvolutions():
            return to_unit_range(self._autoencoder.decode(self._raw(latents), return_dict=False)[0])

    def _raw(self, latents: torch.Tensor) -> torch.Tensor:
        """The latents as the autoencoder takes them."""
        return self._restore(latents.to(self._device, torch.float32)).to(self._dtype)


def to_unit_range(frames: torch.Tensor) -> torch.Tensor:
    """[batch, 3, frames, height, width] in [-1, 1] as [batch, frames, height, width, 3], float32 in [0, 1]."""
    return frames.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0).permute(0, 2, 3, 4, 1).contiguous()


def by_factor(scaling_factor: float) -> Restore:
    """Of latents that are raw ones times `scaling_factor`."""
    return lambda latents: latents / scaling_factor


def by_statistics(mean: torch.Tensor, std: torch.Tensor, scaling_factor: float = 1.0) -> Restore:
    """Of latents that are (raw - mean) / std * scaling_factor. mean, std: [channels], on the decoder's device."""
    mean, std = (statistic.view(1, -1, 1, 1, 1) for statistic in (mean, std))
    return lambda latents: latents * std / scaling_factor + mean


def read_statistics(folder: AnyFolder) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the latents, of every channel. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, COMPONENT)
    num_channels = file.whole_number("z_dim", 16)
    return file.numbers("latents_mean", num_channels), file.numbers("latents_std", num_channels)


def restore_by_config(folder: AnyFolder, device: torch.device) -> Restore:
    """`by_statistics` of vae/config.json. Raises ModelLoadError that names the file and the key."""
    mean, std = (torch.tensor(statistic, device=device) for statistic in read_statistics(folder))
    return by_statistics(mean, std)
