"""The LongCat-Image family: text to image. FLUX.1's transformer and decoder, and Qwen2.5-VL for the text.

Prompts are not rewritten: what the authors' pipeline asks its language model to do first is left to the user.
"""

from __future__ import annotations

import dataclasses

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.models.declaration import TextEncoding, TextShapes, Weights
from diffusion_runtime.models.flux1.config import Flux1TransformerConfig
from diffusion_runtime.models.flux1.config import read_transformer_config as read_original_config
from diffusion_runtime.models.flux1.family import FAMILY as ORIGINAL
from diffusion_runtime.models.longcat_image.text import MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.longcat_image.transformer import LongCatImageTransformer
from diffusion_runtime.models.longcat_image.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.published import published_defaults


def read_transformer_config(folder: AnyFolder) -> Flux1TransformerConfig:
    """Read transformer/config.json, whose pooled_projection_dim nothing uses. Raises ModelLoadError."""
    read_config(folder, "transformer").refuse_unknown(
        {*config_fields.keys_of(Flux1TransformerConfig), "patch_size", "in_channels"} - {"guidance_embeds"}
    )
    return dataclasses.replace(read_original_config(folder), pooled_dim=None)


FAMILY = dataclasses.replace(
    ORIGINAL,
    name="longcat_image",
    files=dataclasses.replace(
        ORIGINAL.files,
        transformer_classes=("LongCatImageTransformer2DModel",),
        pipeline_classes=("LongCatImagePipeline",),
    ),
    requests=dataclasses.replace(ORIGINAL.requests, defaults=published_defaults("longcat-image")),
    text=TextEncoding(shapes=lambda _, config: TextShapes(((MAX_TOKENS, config.text_dim),)), load=load_text_encoder),
    read_config=read_transformer_config,
    transformer=LongCatImageTransformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES),
    adapt=lambda model: model,
)
