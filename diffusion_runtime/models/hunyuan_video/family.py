"""The HunyuanVideo family: its settings, and how the parts of a HunyuanVideo folder are built and loaded."""

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
from diffusion_runtime.models.hunyuan_video import codec, text
from diffusion_runtime.models.hunyuan_video.config import read_geometry, read_transformer_config
from diffusion_runtime.models.hunyuan_video.transformer import REFINER_ROLE, HunyuanVideoTransformer
from diffusion_runtime.models.hunyuan_video.weights import stays_float32, transformer_pieces
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder, ModelFamily
from diffusion_runtime.text_encoders.interface import TextEncoder


class HunyuanVideoFamily(ModelFamily):
    """HunyuanVideo text-to-video. Its text refiner has no grid and counts as `cross`: sparse choices pass over it."""

    name = "hunyuan_video"
    transformer_classes = ("HunyuanVideoTransformer3DModel",)
    pipeline_classes = ("HunyuanVideoPipeline",)
    diffusers_components = (codec.AUTOENCODER,)
    roles = (("self", "self"), (REFINER_ROLE, "cross"))
    # 720p, five seconds at 24 frames a second, as its authors document them; distilled from guidance.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 720,
        "width": 1280,
        "num_frames": 129,
        "fps": 24,
        "num_inference_steps": 50,
        "guidance_scale": 6.0,
        "flow_shift": 7.0,
        "sampler": "flow_match_euler",
        "guidance_mode": "batched",
    }

    def check_settings(self, folder: Path) -> None:
        super().check_settings(folder)
        codec.read_scaling_factor(folder)

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        super().schedule(folder, scheduler)
        return LinearSigmas()

    def embeds_guidance(self, folder: Path) -> bool:
        return read_transformer_config(folder).has_guidance

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> HunyuanVideoTransformer:
        config = read_transformer_config(folder)
        with torch.device("meta"):
            return HunyuanVideoTransformer(config, read_geometry(folder), policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return text.load_text_encoder(folder, device, dtype)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> HunyuanVideoTransformer:
        assert isinstance(transformer, HunyuanVideoTransformer)
        pieces = transformer_pieces(transformer.config)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            load_weights(transformer, checkpoint, pieces, device, dtype, stays_float32=stays_float32)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)
