"""Qwen-Image-Edit (arXiv:2508.02324): images to edit, which the language model sees with the prompt, and whose latents
follow those of the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_index
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.models.reference_images import (
    ReferenceConditioner,
    ReferenceImages,
    load_encoder,
    scaled_to,
)
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.picture_language_model import PictureLanguageEncoder, load_picture_language_model

# Pixels along each side of a token of the language model.
_SEEN_PATCH = 28
# Pixels of the picture that the autoencoder encodes, and of those that the language model sees of several.
AREA, SEEN_AREA = 1024 * 1024, 384 * 384
# Text tokens of a prompt, as its authors' pipelines allow.
MAX_TOKENS = 1024

# The template that the model was trained with; the 64 tokens before the pictures are dropped.
TEMPLATE = PromptTemplate(
    before=(
        "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
        "background), then explain how the user's text instruction should alter or modify the image. Generate a new "
        "image that meets the user's requirements while maintaining consistency with the original input where "
        "appropriate.<|im_end|>\n<|im_start|>user\n"
    ),
    after="<|im_end|>\n<|im_start|>assistant\n",
    num_cropped=64,
)


@dataclass(frozen=True)
class Editing:
    """A pipeline's use of images. published: the model whose request values are its defaults. most: how many; more than
    the authors tried cost memory only. seen_area: of a picture for the language model, label: before it."""

    published: str
    most: int
    seen_area: int
    label: str

    @property
    def seen_tokens(self) -> int:
        """Approximate number of the language model's tokens of a picture: one for 28 x 28 pixels."""
        return math.ceil(self.seen_area / _SEEN_PATCH**2)

    @property
    def references(self) -> ReferenceImages:
        return ReferenceImages(self.most, partial(scaled_to, AREA), sized_by=-1)

    def load_text_encoder(self, folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> PictureLanguageEncoder:
        """Load the encoder of the folder's Qwen2.5-VL. Raises ModelLoadError."""
        scaled = partial(scaled_to, self.seen_area)
        return load_picture_language_model(
            folder, device, dtype, TEMPLATE, scaled, label=self.label, max_tokens=MAX_TOKENS
        )

    def load_conditioner(
        self, autoencoder: DiffusersComponent, folder: AnyFolder, device: torch.device, dtype: torch.dtype
    ) -> ReferenceConditioner:
        """Load the encoder of a diffusers folder's `vae`. Raises ModelLoadError."""
        encode, name = load_encoder(autoencoder, folder, device, dtype)
        return ReferenceConditioner(self.references, encode, "diffusers", name)


PIPELINES = {
    "QwenImageEditPipeline": Editing("qwen-image-edit", most=1, seen_area=AREA, label=""),
    "QwenImageEditPlusPipeline": Editing("qwen-image-edit-2509", most=3, seen_area=SEEN_AREA, label="Picture {}: "),
}


def editing_of(folder: AnyFolder) -> Editing | None:
    """Return how a folder's pipeline uses images; None for one that makes images from text alone."""
    return PIPELINES.get(str(read_index(folder).get("_class_name")))
