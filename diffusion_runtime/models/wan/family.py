"""The Wan family: text to video by one transformer, by two experts (2.2 A14B), or by one that also starts from an image
(2.2 TI2V)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.model_folder import AnyFolder
from diffusion_runtime.models.checkpoint import Checkpoint, WeightChange, load_weights
from diffusion_runtime.models.family import Model, ModelFamily
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
        read_weights=_weight_reader(model.folder, COMPONENTS[:1]),
    )
    if pipeline.boundary is None:
        return model
    boundary = pipeline.boundary
    second = read_transformer_config(model.folder, COMPONENTS[1])

    def experts(policy: AttentionPolicy) -> WanExperts:
        return WanExperts((model.config, second), model.geometry, policy, boundary)

    return dataclasses.replace(
        model,
        defaults={**model.defaults, **_EXPERT_DEFAULTS},
        transformer_components=COMPONENTS,
        make_transformer=experts,
        read_weights=_weight_reader(model.folder, COMPONENTS),
    )


def _weight_reader(
    folder: AnyFolder, components: Sequence[str]
) -> Callable[[DiffusionTransformer, torch.device, torch.dtype, Sequence[WeightChange]], None]:
    """See Model.read_weights. components: one for each expert."""

    def read_weights(
        transformer: DiffusionTransformer, device: torch.device, dtype: torch.dtype, changes: Sequence[WeightChange]
    ) -> None:
        assert isinstance(transformer, WanTransformer | WanExperts)
        for index, component in enumerate(components):
            expert = transformer if isinstance(transformer, WanTransformer) else transformer.expert(index)
            _read(folder / component, expert, device, dtype, changes)

    return read_weights


def _read(
    folder: Path,
    transformer: WanTransformer,
    device: torch.device,
    dtype: torch.dtype,
    changes: Sequence[WeightChange],
) -> None:
    with Checkpoint(folder, changes=changes) as checkpoint:
        if any(f".{GATE}." in name for name in checkpoint.shapes):
            transformer.add_gates()
        load_weights(
            transformer,
            checkpoint,
            transformer_pieces(transformer.config),
            device,
            dtype,
            stays_float32=stays_float32,
            ignored=lambda name: name.endswith(IGNORED_SUFFIXES),
        )


FAMILY = ModelFamily(
    name="wan",
    transformer_classes=("WanTransformer3DModel",),
    # The second one is FastVideo's name of the first where the sampler is dmd; diffusers has no such class.
    pipeline_classes=("WanPipeline", "WanDMDPipeline"),
    index_keys=("boundary_ratio", "expand_timesteps"),
    diffusers_components=(codec.AUTOENCODER,),
    roles=(("self", "self"), ("cross", "cross")),
    decoder_splits_rows=True,
    defaults=published_defaults("wan2.1-1.3b"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=WanTransformer,
    pieces=transformer_pieces,
    stays_float32=stays_float32,
    shared_heads=lambda config: config.num_heads,
    load_text_encoder=_load_text_encoder,
    load_decoder=codec.load_decoder,
    load_image_conditioner=codec.load_image_conditioner,
    check_parts=read_statistics,
    adapt=_adapt,
)
