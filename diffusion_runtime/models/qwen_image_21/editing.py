"""Images to edit with Qwen-Image 2.1: their latents take the language model's positions of them, before the prompt."""

from __future__ import annotations

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT
from diffusion_runtime.models.qwen_image_21.codec import AUTOENCODER, RGBA
from diffusion_runtime.models.reference_images import (
    Encode,
    ReferenceConditioner,
    ReferenceImages,
    Size,
    load_encoder,
    scaled_to,
)

# Pixels of a picture for the autoencoder and for the language model alike.
AREA = 1024 * 1024
# diffusers' pipeline has no limit; more cost time and memory only.
MOST = 4


def scaled(size: Size) -> Size:
    """Return height and width of the picture made of an image: multiples of 32."""
    return scaled_to(AREA, size)


REFERENCES = ReferenceImages(MOST, scaled, sized_by=-1, usual=0, are_cached=True)


def load_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> ReferenceConditioner:
    """Load the encoder of a diffusers folder's `vae`. Raises ModelLoadError."""
    encode, name = load_opaque_encoder(folder, device, dtype)
    return ReferenceConditioner(REFERENCES, encode, "diffusers", name)


def load_opaque_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> tuple[Encode, str]:
    """Load the encoder of a diffusers folder's `vae` for pictures without transparency, and its name for the report.
    Raises ModelLoadError."""
    encode, name = load_encoder(AUTOENCODER, folder, device, dtype)
    if read_config(folder, COMPONENT).whole_number("in_channels", RGBA) == RGBA:
        encode = _opaque(encode)
    return encode, name


def _opaque(encode: Encode) -> Encode:
    """Return an encoder of pictures with a fourth channel, their opacity: images with transparent parts are refused."""
    return lambda pixels: encode(torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1))
