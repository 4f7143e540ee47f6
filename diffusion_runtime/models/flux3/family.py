"""The FLUX.3 family: images from text and from reference images, by FLUX.3 Image [klein], which has two branches of
guidance before distillation, and is a flow map without guidance after it. FLUX.2's autoencoder; Qwen3-VL for the text.

Prompts are not rewritten: the language model that the authors' pipeline asks first (the prompt upsampler) is left out.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.image_decoder import image_tiling
from diffusion_runtime.denoising.flow_schedule import FlowMapSchedule, LinearSigmas, token_shift
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.flux2 import codec
from diffusion_runtime.models.flux2.editing import load_conditioner
from diffusion_runtime.models.flux3.config import (
    BASE,
    DISTILLED,
    Flux3TransformerConfig,
    read_geometry,
    read_transformer_config,
)
from diffusion_runtime.models.flux3.editing import references
from diffusion_runtime.models.flux3.text import LAYERS, MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.flux3.transformer import REFERENCE_ROLE, TEXT_ROLE, Flux3Transformer
from diffusion_runtime.models.flux3.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.reference_images import of_pictures

# For the flow map.
_FEW_STEPS = published_defaults("flux.3-image-klein", "num_inference_steps", "guidance_scale")


class _FlowMapSigmas(FlowMapSchedule, LinearSigmas):
    """Linear sigmas of a flow map."""


_Model = Model[Flux3TransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with reference images; as a flow map with its steps, and without guidance."""
    images = references(model.geometry.spatial_factor)
    model = dataclasses.replace(
        model,
        inputs=ImageInputs(images={"image_path": False}, references=images),
        load_image_conditioner=partial(load_conditioner, images, model.folder),
    )
    if not model.config.is_flow_map:
        return model
    return dataclasses.replace(
        model,
        sampling=dataclasses.replace(model.sampling, schedule=_FlowMapSigmas(), takes_guidance=False),
        defaults={**model.defaults, **_FEW_STEPS},
    )


def _text_shapes(_: AnyFolder, config: Flux3TransformerConfig) -> TextShapes:
    return TextShapes(((MAX_TOKENS, config.text_dim),), num_layers=max(LAYERS))


FAMILY = ModelFamily(
    name="flux3",
    files=FolderFormat(
        transformer_classes=("Flux3Transformer2DModel",),
        pipeline_classes=(BASE, DISTILLED),
        diffusers_components=(codec.AUTOENCODER,),
        unread=("prompt_upsampler", "prompt_upsampler_processor"),
    ),
    # Blocks of text and references alone have no grid: backends that need one skip them, like any cross-attention.
    roles=(("self", "self"), (TEXT_ROLE, "cross"), (REFERENCE_ROLE, "cross")),
    requests=Requests(defaults=published_defaults("flux.3-image-klein-base"), read_schedule=token_shift),
    text=TextEncoding(shapes=_text_shapes, load=load_text_encoder),
    decoding=Decoding(
        load=codec.load_decoder, load_encoder=of_pictures(codec.load_encoder), tiling=image_tiling, has_exact_tiles=True
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=Flux3Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES),
    adapt=_adapt,
)
