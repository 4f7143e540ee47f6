"""FLUX.2's reference images (Black Forest Labs, 2025): any number of pictures, whose tokens follow those of the noise,
each at its own position on the first axis."""

from __future__ import annotations

import math

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.flux2.codec import load_encoder
from diffusion_runtime.models.reference_images import ReferenceConditioner, ReferenceImages, Size

# Larger pictures are scaled down to it; smaller ones stay as they are.
AREA = 1024 * 1024
# Limits of an image, as its authors' pipelines check it.
_SHORTEST_SIDE, _MOST_UNEQUAL = 64, 8
# Maximum that its authors recommend for [dev] and allow for [klein], by docs.bfl.ai.
MOST_DEV, MOST_KLEIN = 6, 4


def scaled_down(size: Size) -> Size:
    """Return the size of the picture that is made of an image: a megapixel of its ratio at most."""
    height, width = size
    if height * width <= AREA:
        return size
    scale = math.sqrt(AREA / (height * width))
    return int(height * scale), int(width * scale)


def refusal(size: Size) -> str | None:
    """Return why an image of this size is not used."""
    if min(size) < _SHORTEST_SIDE:
        return f"expected sides of at least {_SHORTEST_SIDE} pixels; scale it up"
    if max(size) > _MOST_UNEQUAL * min(size):
        return f"expected sides of a ratio of {_MOST_UNEQUAL} : 1 at most; crop it"
    return None


def references(most: int, multiple: int) -> ReferenceImages:
    """Return the rules for reference images. most: per request. multiple: pixels along each side of a token."""

    def cropped(size: Size) -> Size:
        height, width = (side // multiple * multiple for side in size)
        return height, width

    return ReferenceImages(most, scaled_down, cropped, refusal, sized_by=0, usual=0)


def load_conditioner(
    images: ReferenceImages, folder: AnyFolder, device: torch.device, dtype: torch.dtype
) -> ReferenceConditioner:
    """Load the encoder of a diffusers folder's `vae`. Raises ModelLoadError."""
    encode, name = load_encoder(folder, device, dtype)
    return ReferenceConditioner(images, encode, "diffusers", name)
