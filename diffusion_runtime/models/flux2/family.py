"""The FLUX.2 family: text to image by [dev], which takes the guidance scale as an input, and [klein], which has two
branches of guidance, or none where it is distilled to four steps. Neither edits pictures here."""

from __future__ import annotations

import dataclasses

from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.flux2 import codec
from diffusion_runtime.models.flux2.config import (
    DEV,
    KLEIN,
    Flux2TransformerConfig,
    read_geometry,
    read_pipeline_config,
    read_transformer_config,
)
from diffusion_runtime.models.flux2.schedule import read_schedule
from diffusion_runtime.models.flux2.text import load_text_encoder
from diffusion_runtime.models.flux2.transformer import Flux2Transformer
from diffusion_runtime.models.flux2.weights import transformer_pieces
from diffusion_runtime.models.image_geometry import ImageGeometry
from diffusion_runtime.models.published import published_defaults

# Of a model that was distilled to run without guidance.
_FEW_STEPS = published_defaults("flux.2-klein-4b", "num_inference_steps", "guidance_scale")

_Model = Model[Flux2TransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Distilled: four steps and no guidance."""
    model = dataclasses.replace(model, embeds_guidance=model.config.embeds_guidance)
    if not read_pipeline_config(model.folder).is_distilled:
        return model
    return dataclasses.replace(model, takes_guidance=False, defaults={**model.defaults, **_FEW_STEPS})


FAMILY = ModelFamily(
    name="flux2",
    transformer_classes=("Flux2Transformer2DModel",),
    pipeline_classes=(DEV, KLEIN),
    index_keys=("is_distilled",),
    diffusers_components=(codec.AUTOENCODER,),
    roles=(("self", "self"),),
    # Of [klein] before distillation, too.
    defaults=published_defaults("flux.2-dev"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    read_schedule=read_schedule,
    transformer=Flux2Transformer,
    pieces=transformer_pieces,
    shared_heads=lambda config: config.num_heads,
    load_text_encoder=load_text_encoder,
    load_decoder=codec.load_decoder,
    adapt=_adapt,
)
