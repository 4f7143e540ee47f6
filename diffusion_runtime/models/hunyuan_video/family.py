"""The HunyuanVideo family: text to video. Its decoder and its declaration."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.layers.sample_decoder import Tiling
from diffusion_runtime.model_folder import AnyFolder, read_config
from diffusion_runtime.models.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.models.family import Model, ModelFamily, TextShapes
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.hunyuan_video.config import HunyuanVideoConfig, read_geometry, read_transformer_config
from diffusion_runtime.models.hunyuan_video.lora_names import LORA_NAMES
from diffusion_runtime.models.hunyuan_video.text import MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.hunyuan_video.transformer import REFINER_ROLE, HunyuanVideoTransformer
from diffusion_runtime.models.hunyuan_video.weights import stays_float32, transformer_pieces
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.video_decoder import VideoDecoder, by_factor, norm_fused

AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_hunyuan_video", "AutoencoderKLHunyuanVideo"
)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> VideoDecoder:
    """The decoder of a diffusers folder's `vae`.

    As its authors run it, it decodes 17 frames of at most 256 x 256 pixels at a time and blends what overlaps.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("encoder", "quant_conv"))
    factor = int(autoencoder.temporal_compression_ratio)
    decoders = norm_fused(autoencoder, lambda module, raw: module.decoder(module.post_quant_conv(raw)), factor)
    restore = by_factor(read_scaling_factor(folder))
    return VideoDecoder(autoencoder, restore, decoders, _tiling(autoencoder), is_tiled=True)


def _tiling(autoencoder: Any) -> Tiling:
    """Diffusers' sizes: 16 frames and 256 pixels a side, that overlap by 4 and 64."""
    pixels, frames = int(autoencoder.spatial_compression_ratio), int(autoencoder.temporal_compression_ratio)
    return Tiling(
        autoencoder.tile_sample_min_height // pixels,
        autoencoder.tile_sample_stride_height // pixels,
        pixels,
        (autoencoder.tile_sample_min_num_frames // frames, autoencoder.tile_sample_stride_num_frames // frames),
    )


def read_scaling_factor(folder: AnyFolder) -> float:
    """What latents are multiplied with. Raises ModelLoadError that names the file and the key."""
    return read_config(folder, COMPONENT).number("scaling_factor", 0.476986)


_Model = Model[HunyuanVideoConfig, LatentGeometry]


def _adapt(model: _Model) -> _Model:
    return dataclasses.replace(model, embeds_guidance=model.config.has_guidance)


FAMILY = ModelFamily(
    name="hunyuan_video",
    transformer_classes=("HunyuanVideoTransformer3DModel",),
    pipeline_classes=("HunyuanVideoPipeline",),
    diffusers_components=(AUTOENCODER,),
    # The text refiner has no grid and counts as `cross`: sparse choices pass over it.
    roles=(("self", "self"), (REFINER_ROLE, "cross")),
    defaults=published_defaults("hunyuan-video"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    schedule=LinearSigmas(),
    transformer=HunyuanVideoTransformer,
    pieces=transformer_pieces,
    lora_names=LORA_NAMES,
    stays_float32=stays_float32,
    shared_heads=lambda config: config.num_heads,
    text_shapes=lambda _, config: TextShapes(((MAX_TOKENS, config.text_dim),), config.pooled_dim),
    load_text_encoder=load_text_encoder,
    load_decoder=load_decoder,
    tiny_decoders={16: "taehv"},
    shares_decoding=True,
    decodes_fast=True,
    has_tiles=True,
    decodes_in_tiles=True,
    check_parts=read_scaling_factor,
    adapt=_adapt,
)
