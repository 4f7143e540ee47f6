"""The FLUX.1 family: text to image by [dev], which takes the guidance scale as an input, and [schnell], which runs
without; editing by Kontext; repainting a part of an image by Fill; edges and depth by Canny and Depth."""

from __future__ import annotations

import dataclasses
from functools import partial

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.decoders.image_decoder import AUTOENCODER, load_image_decoder, read_normalisation
from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.models.family import Model, ModelFamily, TextShapes
from diffusion_runtime.models.flux1 import editing
from diffusion_runtime.models.flux1.config import Flux1TransformerConfig, read_geometry, read_transformer_config
from diffusion_runtime.models.flux1.control import PIPELINES, control_of, size_made
from diffusion_runtime.models.flux1.text import MAX_TOKENS, MAX_TOKENS_FEW_STEPS, load_text_encoder
from diffusion_runtime.models.flux1.transformer import Flux1Transformer
from diffusion_runtime.models.flux1.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.published import published_defaults

# For a model that was distilled to run without guidance.
_FEW_STEPS = published_defaults("flux.1-schnell", "num_inference_steps", "guidance_scale")

_Model = Model[Flux1TransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with its folder's pipeline: an image to edit, or one of the output's size."""
    control = control_of(model.folder)
    if control is not None:
        return dataclasses.replace(
            _with_guidance(model),
            images=control.images,
            size_of_image=size_made,
            defaults={**model.defaults, **published_defaults(control.published)},
            load_image_conditioner=partial(control.load_conditioner, model.folder),
        )
    if not editing.edits(model.folder):
        return _with_guidance(model)
    return dataclasses.replace(
        _with_guidance(model),
        images={"image_path": False},
        references=editing.REFERENCES,
        defaults={**model.defaults, **published_defaults("flux.1-kontext-dev")},
        load_image_conditioner=partial(editing.load_conditioner, model.folder),
    )


def _with_guidance(model: _Model) -> _Model:
    """Return the model with its guidance. Without an embedded scale: the four steps of FLUX.1 [schnell], no guidance,
    and its shorter texts."""
    if model.config.embeds_guidance:
        return dataclasses.replace(model, embeds_guidance=True)
    return dataclasses.replace(
        model,
        defaults={**model.defaults, **_FEW_STEPS},
        load_text_encoder=partial(load_text_encoder, model.folder, max_tokens=MAX_TOKENS_FEW_STEPS),
    )


FAMILY = ModelFamily(
    name="flux1",
    transformer_classes=("FluxTransformer2DModel",),
    pipeline_classes=("FluxPipeline", editing.PIPELINE, *PIPELINES),
    diffusers_components=(AUTOENCODER,),
    roles=(("self", "self"),),
    defaults=published_defaults("flux.1-dev"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    read_schedule=token_shift,
    transformer=Flux1Transformer,
    pieces=transformer_pieces,
    lora_names=LORA_NAMES,
    shared_heads=lambda config: config.num_heads,
    text_shapes=lambda _, config: TextShapes(
        ((MAX_TOKENS, config.text_dim),), config.pooled_dim, condition_channels=config.condition_channels
    ),
    load_text_encoder=load_text_encoder,
    load_decoder=load_image_decoder,
    check_parts=read_normalisation,
    adapt=_adapt,
)
