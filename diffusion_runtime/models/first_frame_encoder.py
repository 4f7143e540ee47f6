"""An image as the first latent frame of a video, or a whole clip, by the encoder of diffusers' autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.interface import LatentEncoder
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.models.interface import FrameConditioner, ImageCondition
from diffusion_runtime.report.attention_report import LibraryAttention


class FirstFrameConditioner(FrameConditioner):
    """Image conditioner that returns the most likely latents of an image, (raw - latents_mean) / latents_std *
    scaling_factor, in float32.

    autoencoder: diffusers' module, whose `latents_mean` and `latents_std` are of every channel; 0 and 1 without any.
    """

    library = "diffusers"

    def __init__(self, autoencoder: Any, scaling_factor: float) -> None:
        self._autoencoder = autoencoder
        self._scaling_factor = scaling_factor

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        implementation = f"{type(self._autoencoder).__name__}'s encoder"
        return (LibraryAttention("vae encoder", self.library, implementation),)

    def encode(
        self,
        image: torch.Tensor,
        size: ClipSize,  # noqa: ARG002
        last_image: torch.Tensor | None = None,  # noqa: ARG002
    ) -> ImageCondition:
        weight = next(self._autoencoder.parameters())
        pixels = image.to(weight.device, torch.float32).div(127.5).sub(1.0).permute(2, 0, 1)[None, :, None]
        return ImageCondition(self.encode_frames(pixels))

    def encode_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the latents of a clip, float32, [1, channels, latent frames, height, width]. frames: [1, 3, frames,
        height, width] in [-1, 1]."""
        weight = next(self._autoencoder.parameters())
        pixels = frames.to(weight.device)
        with torch.inference_mode(), OneDnnConvolutions():
            mode: torch.Tensor = self._autoencoder.encode(pixels.to(weight.dtype)).latent_dist.mode()
        if not hasattr(self._autoencoder, "latents_mean"):
            return mode.float() * self._scaling_factor
        mean, std = (
            statistic.to(weight.device, torch.float32).view(1, -1, 1, 1, 1)
            for statistic in (self._autoencoder.latents_mean, self._autoencoder.latents_std)
        )
        normalised: torch.Tensor = (mode.float() - mean) / std * self._scaling_factor
        return normalised


def of_clips(
    load: Callable[[AnyFolder, torch.device, torch.dtype], FirstFrameConditioner],
) -> Callable[[AnyFolder, torch.device, torch.dtype], LatentEncoder]:
    """Return Decoding.load_encoder of a family whose first frames are encoded by what `load` loads."""

    def load_latent_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
        conditioner = load(folder, device, dtype)
        return LatentEncoder(conditioner.encode_frames, lambda: conditioner.libraries)

    return load_latent_encoder
