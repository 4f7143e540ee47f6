"""The Wan family: text to video by one transformer, by two experts (2.2 A14B), or by one that also starts from an image
(2.2 TI2V)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch
from torch import nn

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.model_folder import AnyFolder
from diffusion_runtime.models.checkpoint import Piece
from diffusion_runtime.models.family import Model, ModelFamily, TextShapes
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.video_decoder import read_statistics
from diffusion_runtime.models.wan import codec
from diffusion_runtime.models.wan.config import (
    GATE,
    WanTransformerConfig,
    read_geometry,
    read_pipeline_config,
    read_transformer_config,
)
from diffusion_runtime.models.wan.experts import COMPONENTS, WanExperts
from diffusion_runtime.models.wan.lora_names import LORA_NAMES
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.models.wan.weights import IGNORED_SUFFIXES, stays_float32, transformer_pieces
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.t5 import MAX_TOKENS, load_umt5

# Where Wan 2.2's own examples differ. Two experts make 480p as well, which stays the default.
_EXPERT_DEFAULTS = published_defaults("wan2.2-t2v-a14b", "num_inference_steps", "guidance_scale", "guidance_scale_2")
_IMAGE_DEFAULTS = published_defaults("wan2.2-ti2v-5b", "height", "width", "num_frames", "fps")

_Model = Model[WanTransformerConfig, LatentGeometry]


def _load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    max_tokens = generation_settings(folder).max_text_tokens
    return load_umt5(folder, device, dtype, max_tokens=MAX_TOKENS if max_tokens is None else max_tokens)


def _adapt(model: _Model) -> _Model:
    """What the folder's pipeline asks for: two experts, or an image to start from."""
    pipeline = read_pipeline_config(model.folder)
    model = dataclasses.replace(
        model,
        takes_image=pipeline.takes_image,
        defaults={**model.defaults, **(_IMAGE_DEFAULTS if pipeline.takes_image else {})},
        pieces=lambda _: _pieces_with_gates(model.config),
        prepare=_add_gates,
        is_ignored=lambda name: name.endswith(IGNORED_SUFFIXES),
    )
    if pipeline.boundary is None:
        return model
    boundary = pipeline.boundary
    second = read_transformer_config(model.folder, COMPONENTS[1])
    configs = dict(zip(COMPONENTS, (model.config, second), strict=True))

    def experts(policy: AttentionPolicy) -> WanExperts:
        return WanExperts((model.config, second), model.geometry, policy, boundary)

    return dataclasses.replace(
        model,
        defaults={**model.defaults, **_EXPERT_DEFAULTS},
        transformer_components=COMPONENTS,
        make_transformer=experts,
        modules=_experts_of,
        pieces=lambda component: _pieces_with_gates(configs[component]),
    )


def _experts_of(transformer: DiffusionTransformer) -> Mapping[str, nn.Module]:
    assert isinstance(transformer, WanExperts)
    return {component: transformer.expert(index) for index, component in enumerate(COMPONENTS)}


def _add_gates(module: nn.Module, names: Collection[str]) -> None:
    """Only the names of a checkpoint's tensors say whether it has gates. names: of all of them."""
    assert isinstance(module, WanTransformer)
    if any(f".{GATE}." in name for name in names):
        module.add_gates()


def _pieces_with_gates(config: WanTransformerConfig) -> Mapping[str, tuple[Piece, ...]]:
    return transformer_pieces(dataclasses.replace(config, has_gate=True))


FAMILY = ModelFamily(
    name="wan",
    transformer_classes=("WanTransformer3DModel",),
    # The second one is FastVideo's name of the first where the sampler is dmd; diffusers has no such class.
    pipeline_classes=("WanPipeline", "WanDMDPipeline"),
    index_keys=("boundary_ratio", "expand_timesteps"),
    diffusers_components=(codec.AUTOENCODER,),
    roles=(("self", "self"), ("cross", "cross")),
    shares_decoding=True,
    has_tiles=True,
    decodes_fast=True,
    defaults=published_defaults("wan2.1-1.3b"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=WanTransformer,
    pieces=transformer_pieces,
    lora_names=LORA_NAMES,
    stays_float32=stays_float32,
    shared_heads=lambda config: config.num_heads,
    text_shapes=lambda _, config: TextShapes(((MAX_TOKENS, config.text_dim),)),
    load_text_encoder=_load_text_encoder,
    load_decoder=codec.load_decoder,
    tiny_decoders={16: "taew2_1", 48: "taew2_2"},
    load_image_conditioner=codec.load_image_conditioner,
    check_parts=read_statistics,
    adapt=_adapt,
)
