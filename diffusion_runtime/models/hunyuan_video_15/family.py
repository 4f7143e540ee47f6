"""The HunyuanVideo-1.5 family: its settings, and how the parts of a folder are built and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.flow_schedule import FlowSchedule, LinearSigmas
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.models.checkpoint import Checkpoint, WeightChange, load_weights
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.hunyuan_video_15 import codec, image, text
from diffusion_runtime.models.hunyuan_video_15.config import (
    IMAGE_TO_VIDEO,
    TEXT_TO_VIDEO,
    read_geometry,
    read_guidance_scale,
    read_transformer_config,
    wide_size,
)
from diffusion_runtime.models.hunyuan_video_15.text_stream import REFINER_ROLE
from diffusion_runtime.models.hunyuan_video_15.transformer import HunyuanVideo15Transformer
from diffusion_runtime.models.hunyuan_video_15.weights import stays_float32, transformer_pieces
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner, LatentDecoder, ModelFamily
from diffusion_runtime.text_encoders.interface import TextEncoder


class HunyuanVideo15Family(ModelFamily):
    """HunyuanVideo-1.5, text-to-video and image-to-video. Its text refiner has no grid and counts as `cross`: sparse
    choices pass over it."""

    name = "hunyuan_video_15"
    transformer_classes = ("HunyuanVideo15Transformer3DModel",)
    pipeline_classes = (TEXT_TO_VIDEO, IMAGE_TO_VIDEO)
    diffusers_components = (codec.AUTOENCODER,)
    roles = (("self", "self"), (REFINER_ROLE, "cross"))
    # 480p, five seconds at 24 frames a second, as its authors document them.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 480,
        "width": 848,
        "num_frames": 121,
        "fps": 24,
        "num_inference_steps": 50,
        "guidance_scale": 6.0,
        "flow_shift": 5.0,
        "sampler": "flow_match_euler",
        "guidance_mode": "batched",
    }

    def check_settings(self, folder: Path) -> None:
        super().check_settings(folder)
        codec.read_scaling_factor(folder)
        if self.needs_image(folder):
            image.read_preparation(folder)

    def request_defaults(self, folder: Path) -> Mapping[str, Any]:
        """With the guidance scale of the folder's guider, and the size its transformer was made for."""
        geometry = read_geometry(folder)
        multiple = geometry.spatial_factor * geometry.patch[1]
        height, width = wide_size(read_transformer_config(folder).target_size, multiple)
        scale = read_guidance_scale(folder)
        guidance = {} if scale is None else {"guidance_scale": scale}
        return {**self.defaults, "height": height, "width": width, **guidance}

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        super().schedule(folder, scheduler)
        return LinearSigmas()

    def takes_image(self, folder: Path) -> bool:
        return read_transformer_config(folder).starts_from_image

    def needs_image(self, folder: Path) -> bool:
        return read_transformer_config(folder).starts_from_image

    def load_image_conditioner(self, folder: Path, device: torch.device, dtype: torch.dtype) -> ImageConditioner:
        return image.load_image_conditioner(folder, device, dtype)

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> HunyuanVideo15Transformer:
        config = read_transformer_config(folder)
        with torch.device("meta"):
            return HunyuanVideo15Transformer(config, read_geometry(folder), policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return text.load_text_encoder(folder, device, dtype)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> HunyuanVideo15Transformer:
        assert isinstance(transformer, HunyuanVideo15Transformer)
        pieces = transformer_pieces(transformer.config)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            load_weights(transformer, checkpoint, pieces, device, dtype, stays_float32=stays_float32)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)
