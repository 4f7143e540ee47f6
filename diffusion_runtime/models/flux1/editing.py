"""FLUX.1 Kontext (Black Forest Labs, arXiv:2506.15742): an image to edit, whose tokens follow the noise's."""

from __future__ import annotations

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_index
from diffusion_runtime.models.reference_images import (
    ReferenceConditioner,
    ReferenceImages,
    Size,
    load_image_encoder,
)

PIPELINE = "FluxKontextPipeline"
# Widths and heights of about a megapixel, which the model was trained on.
_SIDES = ((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104))
TRAINED_SIZES = (*_SIDES, (1024, 1024), *((height, width) for width, height in reversed(_SIDES)))


# Pixels of a token in height and width.
_MULTIPLE = 16


def trained_size(size: Size) -> Size:
    """Return, among the sizes that the model was trained on, the one whose ratio is nearest to an image's.

    The ratio is that of the image rounded down to whole tokens, as in diffusers' FluxKontextPipeline; a side below one
    token counts as one.
    """
    height, width = (max(side // _MULTIPLE, 1) for side in size)
    _, columns, rows = min((abs(width / height - columns / rows), columns, rows) for columns, rows in TRAINED_SIZES)
    return rows, columns


REFERENCES = ReferenceImages(most=1, scaled=trained_size)


def edits(folder: AnyFolder) -> bool:
    """Return whether a folder's pipeline takes an image to edit."""
    return read_index(folder).get("_class_name") == PIPELINE


def load_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> ReferenceConditioner:
    """Load the encoder of a diffusers folder's `vae`. Raises ModelLoadError."""
    encode, name = load_image_encoder(folder, device, dtype)
    return ReferenceConditioner(REFERENCES, encode, "diffusers", name)
