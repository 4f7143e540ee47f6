"""The LongCat-Image family: text to image. FLUX.1's transformer and decoder, and Qwen2.5-VL for the text.

Prompts are not rewritten: what the authors' pipeline asks its language model to do first is left to the user.
"""

from __future__ import annotations

import dataclasses

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.models.declaration import TextEncoding, TextShapes, Weights
from diffusion_runtime.models.flux1.config import KEYS, Flux1TransformerConfig
from diffusion_runtime.models.flux1.config import read_transformer_config as read_original_config
from diffusion_runtime.models.flux1.family import FAMILY as ORIGINAL
from diffusion_runtime.models.flux1.weights import LORA_NAMES as ORIGINAL_NAMES
from diffusion_runtime.models.flux1.weights import transformer_pieces as original_pieces
from diffusion_runtime.models.longcat_image.text import MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.longcat_image.transformer import LongCatImageTransformer
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.stream_names import embedder_names

# What diffusers calls the embedding of the timestep here, and in FLUX.1.
_TIME, _ORIGINAL_TIME = "time_embed", "time_text_embed"


def read_transformer_config(folder: AnyFolder) -> Flux1TransformerConfig:
    """Read transformer/config.json, whose pooled_projection_dim nothing uses. Raises ModelLoadError."""
    read_config(folder, "transformer").refuse_unknown(set(KEYS) - {"guidance_embeds", "out_channels"})
    return dataclasses.replace(read_original_config(folder), pooled_dim=None)


def transformer_pieces(config: Flux1TransformerConfig) -> dict[str, tuple[Piece, ...]]:
    """Return our parameter name -> the checkpoint tensors that fill it."""
    return {
        name: tuple(dataclasses.replace(piece, name=piece.name.replace(_ORIGINAL_TIME, _TIME)) for piece in pieces)
        for name, pieces in original_pieces(config).items()
    }


# FLUX.1's, apart from its embeddings of guidance scale and pooled text.
_SHARED = {
    name: target
    for name, target in ORIGINAL_NAMES.originals.items()
    if not name.startswith(("time_in", "guidance_in", "vector_in"))
}
LORA_NAMES = dataclasses.replace(
    ORIGINAL_NAMES,
    title="LongCat-Image",
    originals={**_SHARED, **embedder_names("time_in", f"{_TIME}.timestep_embedder")},
    absent={},
    resized={},
    num_blocks=frozenset({10, 20}),
)

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
