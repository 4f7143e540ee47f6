"""SigLIP image encoder (Zhai et al., arXiv:2303.15343): an image as tokens, which join those of a text.

The model is transformers'. The picture is prepared in image_preparation.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.image_preparation import PicturePreparation, read_preparation
from diffusion_runtime.text_encoders.loading import check_model_type, load_encoder

if TYPE_CHECKING:
    from transformers import SiglipVisionModel


class SiglipImageEncoder:
    """Encoder of `image_encoder/` and `feature_extractor/` of a diffusers folder."""

    library = "transformers"

    def __init__(self, model: SiglipVisionModel, preparation: PicturePreparation) -> None:
        self.model = model
        self.preparation = preparation
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """Return the tokens of an image, [1, tokens, dim]. image: [height, width, 3], uint8, of any size."""
        pixels = self.preparation.prepare(image).to(self.model.device, self.model.dtype)
        tokens: torch.Tensor = self.model(pixels).last_hidden_state
        return tokens


def load_siglip(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> SiglipImageEncoder:
    """Load the image encoder of a model folder, from safetensors and json and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "image_encoder", ("siglip_vision_model",))
    preparation = read_preparation(folder / "feature_extractor" / "preprocessor_config.json")
    # Imported late: transformers takes seconds.
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    return SiglipImageEncoder(load_encoder(folder / "image_encoder", SiglipVisionModel, device, dtype), preparation)
