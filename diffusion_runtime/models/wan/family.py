"""The Wan family: text to video by one transformer or by two experts (2.2 A14B), image to video by either (I2V, FLF2V),
by one that does both (2.2 TI2V), with control blocks (VACE), and chunk by chunk (causal checkpoints)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.causal_video_decoder import causal_tiling
from diffusion_runtime.decoders.video_decoder import read_statistics
from diffusion_runtime.denoising.flow_schedule import FlowMapSchedule
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.riflex import TemporalFrequencies
from diffusion_runtime.layers.rope import THETA, split_head_dim
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.text_encoder_weights import fill_text_encoder
from diffusion_runtime.models.video_control import FILES, VideoControl
from diffusion_runtime.models.wan import codec
from diffusion_runtime.models.wan.causal import read_cache_defaults, read_far_defaults
from diffusion_runtime.models.wan.clip_condition import load_clip_conditioner
from diffusion_runtime.models.wan.codec import load_image_conditioner
from diffusion_runtime.models.wan.config import (
    CONTROL_PIPELINE,
    GATE,
    IMAGE_PIPELINE,
    TEXT_PIPELINES,
    TRANSFORMER_CLASSES,
    WanTransformerConfig,
    check_pipeline,
    read_geometry,
    read_pipeline_config,
    read_transformer_config,
)
from diffusion_runtime.models.wan.cross_attention import IMAGE_ROLE
from diffusion_runtime.models.wan.experts import COMPONENTS, WanExperts
from diffusion_runtime.models.wan.far_transformer import FarTransformer
from diffusion_runtime.models.wan.flow_map import FLOW_MAP_DEFAULTS
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.models.wan.vace import CONTROL_SELF_ROLE, CONTROL_TEXT_ROLE, WanVaceTransformer
from diffusion_runtime.models.wan.vace_condition import WanControlConditioner
from diffusion_runtime.models.wan.weights import FLOAT32, IGNORED_SUFFIXES, LORA_NAMES, transformer_pieces
from diffusion_runtime.text_encoders.clip import check_clip_image_encoder
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.t5 import MAX_TOKENS, load_umt5, umt5_library
from diffusion_runtime.weights.pieces import NamedPieces

# The flow shift for a folder whose scheduler sets none: that of diffusers' WanPipeline.
_DEFAULTS = {**published_defaults("wan2.1-14b"), "flow_shift": 3.0}
# Defaults in which the examples of other models' authors differ. Those of 14 B make 480p as well, which stays the
# default.
_SAMPLING = ("num_inference_steps", "guidance_scale", "guidance_scale_2")
_EXPERT_DEFAULTS = published_defaults("wan2.2-t2v-a14b", *_SAMPLING)
_IMAGE_EXPERT_DEFAULTS = published_defaults("wan2.2-i2v-a14b", *_SAMPLING)
_IMAGE_DEFAULTS = published_defaults("wan2.1-i2v-14b-480p", *_SAMPLING[:2])
_TWO_IMAGES_DEFAULTS = published_defaults("wan2.1-flf2v-14b-720p", *_SAMPLING[:2])
_FIRST_FRAME_DEFAULTS = published_defaults("wan2.2-ti2v-5b", "height", "width", "num_frames", "fps")

_Model = Model[WanTransformerConfig, LatentGeometry]
# CLIP ViT-H/14 at 224 x 224: 16 x 16 patches and the class.
_NUM_IMAGE_TOKENS = 257


def _load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    max_tokens = generation_settings(folder).max_text_tokens
    max_tokens = MAX_TOKENS if max_tokens is None else max_tokens
    return load_umt5(folder, device, dtype, max_tokens=max_tokens, fill=fill_text_encoder)


def _check_parts(folder: AnyFolder) -> None:
    check_pipeline(folder)
    read_statistics(folder)
    config = read_transformer_config(folder)
    if config.image_dim is not None:
        placed = config.num_placed_tokens
        check_clip_image_encoder(folder, config.image_dim, None if placed is None else placed // 2)


def _adapt(model: _Model) -> _Model:
    """Return the model with its folder's pipeline: two experts, or images to start from and to end with."""
    return _with_flow_map(_with_chunks(_with_experts(_with_control(_with_images(model)))))


def _with_flow_map(model: _Model) -> _Model:
    if model.config.flow_map is None:
        return model
    return dataclasses.replace(
        model,
        sampling=dataclasses.replace(model.sampling, schedule=FlowMapSchedule()),
        defaults={**model.defaults, **FLOW_MAP_DEFAULTS},
    )


def _with_chunks(model: _Model) -> _Model:
    config = model.config
    if not config.is_causal:
        return model
    if config.history is not None:
        return dataclasses.replace(
            model,
            sampling=dataclasses.replace(model.sampling, is_causal=True, history=config.history),
            defaults={**model.defaults, **read_far_defaults(model.folder)},
            make_transformer=lambda policy: FarTransformer(config, model.geometry, policy),
        )
    return dataclasses.replace(
        model,
        sampling=dataclasses.replace(model.sampling, is_causal=True),
        defaults={**model.defaults, **read_cache_defaults(model.folder)},
    )


def _with_control(model: _Model) -> _Model:
    if not model.config.control_layers:
        return model
    control = VideoControl(len(model.config.control_layers), model.geometry)

    def load_conditioner(device: torch.device, dtype: torch.dtype) -> ImageConditioner:
        return WanControlConditioner(load_image_conditioner(model.folder, device, dtype, one_frame=False), control)

    return dataclasses.replace(
        model,
        inputs=ImageInputs(images=FILES),
        sampling=dataclasses.replace(model.sampling, control=control),
        make_transformer=lambda policy: WanVaceTransformer(model.config, model.geometry, policy),
        load_image_conditioner=load_conditioner,
    )


def _with_images(model: _Model) -> _Model:
    config, keeps_first_frame = model.config, read_pipeline_config(model.folder).keeps_first_frame
    if keeps_first_frame:
        return dataclasses.replace(
            model,
            inputs=ImageInputs(images={"image_path": False}),
            sampling=dataclasses.replace(model.sampling, continues_images=True),
            defaults={**model.defaults, **_FIRST_FRAME_DEFAULTS},
        )
    if not config.images:
        return model

    def load_conditioner(device: torch.device, dtype: torch.dtype) -> ImageConditioner:
        factor, has_tokens = model.geometry.temporal_factor, config.image_dim is not None
        return load_clip_conditioner(model.folder, device, dtype, temporal_factor=factor, has_tokens=has_tokens)

    own = _IMAGE_DEFAULTS if config.num_placed_tokens is None else _TWO_IMAGES_DEFAULTS
    return dataclasses.replace(
        model,
        inputs=ImageInputs(images=config.images),
        # A model that needs a last image has none for the middle of a video.
        sampling=dataclasses.replace(model.sampling, continues_images=not config.images.get("last_image_path", False)),
        defaults={**model.defaults, **own},
        load_image_conditioner=load_conditioner,
    )


def _with_experts(model: _Model) -> _Model:
    pipeline = read_pipeline_config(model.folder)
    if pipeline.boundary is None:
        return model
    boundary = pipeline.boundary
    second = read_transformer_config(model.folder, COMPONENTS[1])
    file = model.folder / COMPONENTS[1] / "config.json"
    if second.in_channels != model.config.in_channels:
        raise ModelLoadError(
            f"{file}: key 'in_channels': expected the inputs of the first expert, {model.config.in_channels} channels, "
            f"got {second.in_channels}"
        )
    if second.is_causal != model.config.is_causal:
        raise ModelLoadError(f"{file}: expected a transformer of the class of the first expert")
    if _inputs_of(second) != _inputs_of(model.config):
        raise ModelLoadError(
            f"{file}: expected the images and control blocks of the first expert, {_inputs_of(model.config)}, got "
            f"{_inputs_of(second)}"
        )
    configs = dict(zip(COMPONENTS, (model.config, second), strict=True))

    def experts(policy: AttentionPolicy) -> WanExperts:
        make = WanVaceTransformer if model.sampling.control is not None else WanTransformer
        return WanExperts((model.config, second), model.geometry, policy, boundary, make)

    return dataclasses.replace(
        model,
        defaults={**model.defaults, **(_IMAGE_EXPERT_DEFAULTS if model.config.images else _EXPERT_DEFAULTS)},
        make_transformer=experts,
        modules=_experts_of,
        weights=dataclasses.replace(
            model.weights,
            components=COMPONENTS,
            pieces=lambda component: dict(_pieces_with_gates(configs[component])),
        ),
    )


def _inputs_of(config: WanTransformerConfig) -> tuple[object, ...]:
    return config.num_channels, config.images, config.control_layers


def _experts_of(transformer: DiffusionTransformer) -> Mapping[str, nn.Module]:
    assert isinstance(transformer, WanExperts)
    return {component: transformer.expert(index) for index, component in enumerate(COMPONENTS)}


def _add_gates(module: nn.Module, names: Collection[str]) -> None:
    """Add gates to a module whose checkpoint has them, as only `names`, of all its tensors, show."""
    assert isinstance(module, WanTransformer)
    if any(f".{GATE}." in name for name in names):
        module.add_gates()


def _pieces_with_gates(config: WanTransformerConfig) -> Iterator[NamedPieces]:
    return transformer_pieces(dataclasses.replace(config, has_gate=True))


FAMILY = ModelFamily(
    name="wan",
    files=FolderFormat(
        transformer_classes=TRANSFORMER_CLASSES,
        pipeline_classes=(*TEXT_PIPELINES, IMAGE_PIPELINE, CONTROL_PIPELINE),
        index_keys=("boundary_ratio", "expand_timesteps"),
        diffusers_components=(codec.AUTOENCODER,),
        check_parts=_check_parts,
    ),
    roles=(
        ("self", "self"),
        ("cross", "cross"),
        (IMAGE_ROLE, "cross"),
        (CONTROL_SELF_ROLE, "self"),
        (CONTROL_TEXT_ROLE, "cross"),
    ),
    requests=Requests(defaults=_DEFAULTS, in_comfyui_order=True),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(
            ((MAX_TOKENS, config.text_dim),),
            image=None
            if config.image_dim is None
            else (config.num_placed_tokens or _NUM_IMAGE_TOKENS, config.image_dim),
            condition_channels=config.condition_channels or config.control_channels,
        ),
        load=_load_text_encoder,
        library=umt5_library,
    ),
    decoding=Decoding(
        is_shared=True,
        tiling=causal_tiling,
        modes=("fast",),
        load=codec.load_decoder,
        load_encoder=codec.load_clip_encoder,
        tiny_decoders={16: "taew2_1", 48: "taew2_2"},
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=WanTransformer,
    weights=Weights(
        pieces=_pieces_with_gates,
        lora_names=LORA_NAMES,
        float32=FLOAT32,
        prepare=_add_gates,
        is_ignored=lambda name: name.endswith(IGNORED_SUFFIXES),
    ),
    load_image_conditioner=codec.load_image_conditioner,
    adapt=_adapt,
    temporal=lambda config: TemporalFrequencies(split_head_dim(config.head_dim)[0], THETA),
)
