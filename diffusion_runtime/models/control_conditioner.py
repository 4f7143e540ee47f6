"""ControlConditioner: an image of the output's size as latents, with a mask or without, for control images and for
pictures that are repainted."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.media.images import read_image, read_mask
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.reference_images import Encode, as_pixels
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths


class ControlConditioner(ImageConditioner):
    """Conditioner of latents of an image of the output's size. encode: of the autoencoder; implementation: of it, for
    the report. masks: whether a part of the image is repainted, whose mask comes with it."""

    def __init__(self, encode: Encode, implementation: str, *, masks: bool = False) -> None:
        self._encode = encode
        self._implementation = implementation
        self._masks = masks

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        return (LibraryAttention("vae encoder", "diffusers", self._implementation),)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return the condition, from the mode of the encoder's distribution, of which diffusers draws a sample."""
        (path,) = image_paths(request, "image_path")
        pixels = as_pixels(torch.from_numpy(read_image(path, size.height, size.width)))
        if not self._masks:
            return ImageCondition(self._encode(pixels))
        (mask_path,) = image_paths(request, "mask_path")
        mask = torch.from_numpy(read_mask(mask_path, size.height, size.width))[None, None].float()
        latents = self._encode(pixels * (1 - mask))
        factor = size.height // latents.shape[-2]
        # Every pixel of the mask that a latent covers is a channel of its own.
        of_pixels = F.pixel_unshuffle(mask, factor)[:, :, None].to(latents.device)
        return ImageCondition(torch.cat([latents, of_pixels], dim=1))
