"""The HunyuanVideo family: text to video, and image to video. Its autoencoder and its declaration."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import VideoDecoder, by_factor, norm_fused
from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.layers.riflex import TemporalFrequencies
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.first_frame_encoder import FirstFrameConditioner, of_clips
from diffusion_runtime.models.hunyuan_video.config import (
    IMAGE_TO_VIDEO,
    LATENT_CONCAT,
    TEXT_TO_VIDEO,
    TOKEN_REPLACE,
    HunyuanVideoConfig,
    check_pipeline,
    read_geometry,
    read_transformer_config,
)
from diffusion_runtime.models.hunyuan_video.text import MAX_IMAGE_TOKENS, MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.hunyuan_video.transformer import REFINER_ROLE, HunyuanVideoTransformer
from diffusion_runtime.models.hunyuan_video.weights import FLOAT32, LORA_NAMES, transformer_pieces
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.text_encoders.llava import read_llava_preparation

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_hunyuan_video", "AutoencoderKLHunyuanVideo"
)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> VideoDecoder:
    """Load the decoder of a diffusers folder's `vae`.

    As its authors run it, it decodes 17 frames of at most 256 x 256 pixels at a time and blends the overlaps.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    factor = int(autoencoder.temporal_compression_ratio)
    decoders = norm_fused(autoencoder, lambda module, raw: module.decoder(module.post_quant_conv(raw)), factor)
    restore = by_factor(read_scaling_factor(folder))
    return VideoDecoder(autoencoder, restore, decoders, _tiling(autoencoder))


def load_image_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> FirstFrameConditioner:
    """Load the encoder of a diffusers folder's `vae`. Raises what load_decoder raises."""
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("decoder", "post_quant_conv"))
    return FirstFrameConditioner(autoencoder, read_scaling_factor(folder))


def _tiling(autoencoder: Any) -> Tiling:
    """Return diffusers' tile sizes: 16 frames and 256 pixels a side, with overlaps of 4 and 64."""
    pixels, frames = int(autoencoder.spatial_compression_ratio), int(autoencoder.temporal_compression_ratio)
    return Tiling(
        autoencoder.tile_sample_min_height // pixels,
        autoencoder.tile_sample_stride_height // pixels,
        pixels,
        (autoencoder.tile_sample_min_num_frames // frames, autoencoder.tile_sample_stride_num_frames // frames),
        is_default=True,
    )


def read_scaling_factor(folder: AnyFolder) -> float:
    """Read the factor of latents. Raises ModelLoadError that names the file and the key."""
    return read_config(folder, COMPONENT).number("scaling_factor", 0.476986)


_SAMPLING = ("num_frames", "guidance_scale")
_IMAGE_DEFAULTS = {
    LATENT_CONCAT: published_defaults("hunyuan-video-i2v-33ch", *_SAMPLING),
    TOKEN_REPLACE: published_defaults("hunyuan-video-i2v", *_SAMPLING),
}

_Model = Model[HunyuanVideoConfig, LatentGeometry]


def _check_parts(folder: AnyFolder) -> None:
    read_scaling_factor(folder)
    check_pipeline(folder)
    if read_transformer_config(folder).image_condition is not None:
        read_llava_preparation(folder)


def _adapt(model: _Model) -> _Model:
    sampling = dataclasses.replace(model.sampling, embeds_guidance=model.config.has_guidance)
    model = dataclasses.replace(model, sampling=sampling)
    kind = model.config.image_condition
    if kind is None:
        return model
    return dataclasses.replace(
        model,
        sampling=dataclasses.replace(sampling, continues_images=True, text_sees_images=True),
        defaults={**model.defaults, **_IMAGE_DEFAULTS[kind]},
    )


FAMILY = ModelFamily(
    name="hunyuan_video",
    files=FolderFormat(
        transformer_classes=("HunyuanVideoTransformer3DModel",),
        pipeline_classes=(TEXT_TO_VIDEO, IMAGE_TO_VIDEO),
        diffusers_components=(AUTOENCODER,),
        check_parts=_check_parts,
    ),
    # The text refiner has no grid and counts as `cross`: sparse choices skip it.
    roles=(("self", "self"), (REFINER_ROLE, "cross")),
    requests=Requests(defaults=published_defaults("hunyuan-video"), schedule=LinearSigmas(), in_comfyui_order=True),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(
            ((MAX_TOKENS + (0 if config.image_condition is None else MAX_IMAGE_TOKENS), config.text_dim),),
            config.pooled_dim,
            sees=config.image_condition is not None,
        ),
        load=load_text_encoder,
    ),
    decoding=Decoding(
        load=load_decoder,
        load_encoder=of_clips(load_image_conditioner),
        tiny_decoders={16: "taehv"},
        is_shared=True,
        modes=("fast",),
        tiling=_tiling,
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=HunyuanVideoTransformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32),
    load_image_conditioner=load_image_conditioner,
    images=lambda _, config, __: ImageInputs(images={"image_path": True} if config.image_condition else {}),
    adapt=_adapt,
    temporal=lambda config: TemporalFrequencies(config.axis_channels[0], config.theta),
)
