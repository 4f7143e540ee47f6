"""The HunyuanVideo family: text to video."""

from __future__ import annotations

import dataclasses

from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.hunyuan_video import codec
from diffusion_runtime.models.hunyuan_video.config import HunyuanVideoConfig, read_geometry, read_transformer_config
from diffusion_runtime.models.hunyuan_video.text import load_text_encoder
from diffusion_runtime.models.hunyuan_video.transformer import REFINER_ROLE, HunyuanVideoTransformer
from diffusion_runtime.models.hunyuan_video.weights import stays_float32, transformer_pieces
from diffusion_runtime.models.published import published_defaults

_Model = Model[HunyuanVideoConfig, LatentGeometry]


def _adapt(model: _Model) -> _Model:
    return dataclasses.replace(model, embeds_guidance=model.config.has_guidance)


FAMILY = ModelFamily(
    name="hunyuan_video",
    transformer_classes=("HunyuanVideoTransformer3DModel",),
    pipeline_classes=("HunyuanVideoPipeline",),
    diffusers_components=(codec.AUTOENCODER,),
    # The text refiner has no grid and counts as `cross`: sparse choices pass over it.
    roles=(("self", "self"), (REFINER_ROLE, "cross")),
    defaults=published_defaults("hunyuan-video"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    schedule=LinearSigmas(),
    transformer=HunyuanVideoTransformer,
    pieces=transformer_pieces,
    stays_float32=stays_float32,
    shared_heads=lambda config: config.num_heads,
    load_text_encoder=load_text_encoder,
    load_decoder=codec.load_decoder,
    check_parts=codec.read_scaling_factor,
    adapt=_adapt,
)
