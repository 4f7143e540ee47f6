"""FLUX.1 Fill, Canny and Depth (Black Forest Labs, 2024): an image of the output's size, encoded next to the latents;
for Fill with the part that is repainted masked out, and the mask after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_index
from diffusion_runtime.models.control_conditioner import ControlConditioner
from diffusion_runtime.models.flux1.config import CONTROL, FILL
from diffusion_runtime.models.reference_images import Size, load_image_encoder

# Pixels of the largest image that keeps its size: FLUX.1 makes up to two megapixels.
AREA = 2 * 1024 * 1024
# The size of an image in whole tokens.
_MULTIPLE = 16


def size_made(size: Size) -> Size:
    """Return the output's size where a request sets none: that of the image, in whole tokens, scaled down to two
    megapixels."""
    scale = min(1.0, math.sqrt(AREA / (size[0] * size[1])))
    height, width = (max(_MULTIPLE, int(side * scale) // _MULTIPLE * _MULTIPLE) for side in size)
    return height, width


@dataclass(frozen=True)
class Control:
    """A pipeline's use of images. published: the model whose request values are its defaults. masks: whether a part of
    the image is repainted."""

    published: str
    masks: bool

    @property
    def images(self) -> dict[str, bool]:
        """Image fields of requests, as ImageInputs.images."""
        return {"image_path": True, **({"mask_path": True} if self.masks else {})}

    def load_conditioner(self, folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> ControlConditioner:
        """Load the encoder of a diffusers folder's `vae`. Raises ModelLoadError."""
        encode, name = load_image_encoder(folder, device, dtype)
        return ControlConditioner(encode, name, masks=self.masks)


# Canny and Depth differ in their weights alone.
PIPELINES = {FILL: Control("flux.1-fill-dev", masks=True), CONTROL: Control("flux.1-canny-dev", masks=False)}


def control_of(folder: AnyFolder) -> Control | None:
    """Return how a folder's pipeline uses images; None for one that adds none to the latents."""
    return PIPELINES.get(str(read_index(folder).get("_class_name")))
