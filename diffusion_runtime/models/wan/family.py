"""The Wan family: its settings, and how the parts of a Wan folder are built and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.models.checkpoint import Checkpoint, WeightChange, load_weights
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner, LatentDecoder, ModelFamily
from diffusion_runtime.models.wan import codec
from diffusion_runtime.models.wan.config import GATE, read_geometry, read_pipeline_config, read_transformer_config
from diffusion_runtime.models.wan.experts import COMPONENTS, WanExperts
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.models.wan.weights import IGNORED_SUFFIXES, stays_float32, transformer_pieces
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.umt5 import MAX_TOKENS, load_umt5


class WanFamily(ModelFamily):
    """Wan text-to-video: one transformer, two experts (2.2 A14B), or one that also starts from an image (2.2 TI2V)."""

    name = "wan"
    transformer_classes = ("WanTransformer3DModel",)
    pipeline_classes = ("WanPipeline",)
    index_keys = ("boundary_ratio", "expand_timesteps")
    diffusers_components = (codec.AUTOENCODER,)
    roles = (("self", "self"), ("cross", "cross"))
    decoder_splits_rows = True
    # 480p as in Wan 2.1's own examples: flow shift 3 and guidance 5 to 6 for 1.3B, five seconds at 16 frames a second.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "fps": 16,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "flow_shift": 3.0,
        "sampler": "unipc",
        "guidance_mode": "batched",
    }
    # Where Wan 2.2's own examples differ: 4 and 3 for the two experts in 40 steps; five seconds at 24 frames a second.
    expert_defaults: ClassVar[Mapping[str, Any]] = {
        "num_inference_steps": 40,
        "guidance_scale": 4.0,
        "guidance_scale_2": 3.0,
    }
    image_defaults: ClassVar[Mapping[str, Any]] = {"height": 704, "width": 1280, "num_frames": 121, "fps": 24}

    def check_settings(self, folder: Path) -> None:
        super().check_settings(folder)
        codec.read_statistics(folder)

    def transformer_components(self, folder: Path) -> tuple[str, ...]:
        return COMPONENTS[:1] if read_pipeline_config(folder).boundary is None else COMPONENTS

    def request_defaults(self, folder: Path) -> Mapping[str, Any]:
        pipeline = read_pipeline_config(folder)
        experts = self.expert_defaults if pipeline.boundary is not None else {}
        return {**self.defaults, **experts, **(self.image_defaults if pipeline.takes_image else {})}

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def takes_image(self, folder: Path) -> bool:
        return read_pipeline_config(folder).takes_image

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> WanTransformer | WanExperts:
        pipeline, geometry = read_pipeline_config(folder), read_geometry(folder)
        with torch.device("meta"):
            if pipeline.boundary is None:
                return WanTransformer(read_transformer_config(folder), geometry, policy)
            first, second = (read_transformer_config(folder, component) for component in COMPONENTS)
            return WanExperts((first, second), geometry, policy, pipeline.boundary)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        max_tokens = generation_settings(folder).max_text_tokens
        return load_umt5(folder, device, dtype, max_tokens=MAX_TOKENS if max_tokens is None else max_tokens)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> WanTransformer | WanExperts:
        assert isinstance(transformer, WanTransformer | WanExperts)
        if isinstance(transformer, WanTransformer):
            _load(folder / COMPONENTS[0], transformer, device, dtype, changes)
        else:
            for index, component in enumerate(COMPONENTS):
                _load(folder / component, transformer.expert(index), device, dtype, changes)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)

    def load_image_conditioner(self, folder: Path, device: torch.device, dtype: torch.dtype) -> ImageConditioner:
        return codec.load_image_conditioner(folder, device, dtype)


def _load(
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
