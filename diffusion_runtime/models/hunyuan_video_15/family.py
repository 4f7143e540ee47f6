"""The HunyuanVideo-1.5 family: text to video, and image to video."""

from __future__ import annotations

import dataclasses

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.layers.riflex import TemporalFrequencies
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.guider import read_guidance_scale
from diffusion_runtime.models.hunyuan_video_15 import codec
from diffusion_runtime.models.hunyuan_video_15.config import (
    IMAGE_TO_VIDEO,
    TEXT_TO_VIDEO,
    HunyuanVideo15Config,
    read_geometry,
    read_transformer_config,
    wide_size,
)
from diffusion_runtime.models.hunyuan_video_15.text import MAX_GLYPH_TOKENS, MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.hunyuan_video_15.text_stream import REFINER_ROLE
from diffusion_runtime.models.hunyuan_video_15.transformer import HunyuanVideo15Transformer
from diffusion_runtime.models.hunyuan_video_15.weights import FLOAT32, LORA_NAMES, transformer_pieces
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults

# Tokens of SigLIP, for 384 pixels a side in patches of 14.
_NUM_IMAGE_TOKENS = 729

_Model = Model[HunyuanVideo15Config, LatentGeometry]


def _check_parts(folder: AnyFolder) -> None:
    codec.read_scaling_factor(folder)
    if read_transformer_config(folder).starts_from_image:
        codec.read_preparation(folder)


def _adapt(model: _Model) -> _Model:
    """Return the model with the guidance scale of the folder's guider, and the size its transformer was made for."""
    multiple = model.geometry.spatial_factor * model.geometry.patch[1]
    height, width = wide_size(model.config.target_size, multiple)
    scale = read_guidance_scale(model.folder)
    guidance = {} if scale is None else {"guidance_scale": scale}
    return dataclasses.replace(
        model,
        defaults={**model.defaults, "height": height, "width": width, **guidance},
        sampling=dataclasses.replace(model.sampling, continues_images=model.config.starts_from_image),
    )


FAMILY = ModelFamily(
    name="hunyuan_video_15",
    files=FolderFormat(
        transformer_classes=("HunyuanVideo15Transformer3DModel",),
        pipeline_classes=(TEXT_TO_VIDEO, IMAGE_TO_VIDEO),
        diffusers_components=(codec.AUTOENCODER,),
        check_parts=_check_parts,
    ),
    # The text refiner has no grid and counts as `cross`: sparse choices skip it.
    roles=(("self", "self"), (REFINER_ROLE, "cross")),
    requests=Requests(
        # The flow shift for folders whose scheduler sets none.
        defaults={"flow_shift": 5.0, **published_defaults("hunyuan-video-1.5-t2v")},
        schedule=LinearSigmas(),
        in_comfyui_order=True,
    ),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(
            ((MAX_TOKENS, config.text_dim), (MAX_GLYPH_TOKENS, config.glyph_dim)),
            image=(_NUM_IMAGE_TOKENS, config.image_dim) if config.starts_from_image else None,
        ),
        load=load_text_encoder,
    ),
    decoding=Decoding(
        load=codec.load_decoder,
        load_encoder=codec.load_clip_encoder,
        tiny_decoders={32: "taehv1_5"},
        is_shared=True,
        modes=("fast",),
        tiling=codec.tiling,
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=HunyuanVideo15Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32),
    load_image_conditioner=codec.load_image_conditioner,
    images=lambda _, config, __: ImageInputs(images={"image_path": True} if config.starts_from_image else {}),
    adapt=_adapt,
    temporal=lambda config: TemporalFrequencies(config.axis_channels[0], config.theta),
)
