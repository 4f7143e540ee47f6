"""The control image of a ControlNet for Qwen-Image: the latents of the picture at the output's size."""

from __future__ import annotations

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.media.images import read_image
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.reference_images import Encode, as_pixels, load_encoder
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths


class ControlImageConditioner(ImageConditioner):
    """Conditioner of a control image. implementation: of the encoder, for the report."""

    def __init__(self, encode: Encode, implementation: str) -> None:
        self._encode = encode
        self._implementation = implementation

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        return (LibraryAttention("vae encoder", "diffusers", self._implementation),)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return the condition, from the mode of the encoder's distribution, of which diffusers draws a sample."""
        (path,) = image_paths(request, "image_path")
        return ImageCondition(self._encode(as_pixels(torch.from_numpy(read_image(path, size.height, size.width)))))


def load_control_conditioner(
    autoencoder: DiffusersComponent, folder: AnyFolder, device: torch.device, dtype: torch.dtype
) -> ControlImageConditioner:
    """Load the encoder of a diffusers folder's `vae`. Raises ModelLoadError."""
    return ControlImageConditioner(*load_encoder(autoencoder, folder, device, dtype))
