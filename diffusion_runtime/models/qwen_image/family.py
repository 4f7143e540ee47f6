"""The Qwen-Image family: its settings, and how the parts of a Qwen-Image folder are built and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.denoising.token_shift import token_shift
from diffusion_runtime.models.checkpoint import Checkpoint, WeightChange, load_weights
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder, ModelFamily
from diffusion_runtime.models.qwen_image import codec
from diffusion_runtime.models.qwen_image.config import read_geometry, read_transformer_config
from diffusion_runtime.models.qwen_image.text import load_text_encoder
from diffusion_runtime.models.qwen_image.transformer import QwenImageTransformer
from diffusion_runtime.models.qwen_image.weights import transformer_pieces
from diffusion_runtime.text_encoders.interface import TextEncoder


class QwenImageFamily(ModelFamily):
    """Qwen-Image text-to-image."""

    name = "qwen_image"
    transformer_classes = ("QwenImageTransformer2DModel",)
    pipeline_classes = ("QwenImagePipeline",)
    diffusers_components = (codec.AUTOENCODER,)
    roles = (("self", "self"),)
    # The authors' own, for a square image; their negative prompt is a space.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": " ",
        "height": 1328,
        "width": 1328,
        "num_frames": 1,
        "fps": 1,
        "num_inference_steps": 50,
        "guidance_scale": 4.0,
        "sampler": "flow_match_euler",
        "guidance_mode": "batched",
    }

    def check_settings(self, folder: Path) -> None:
        super().check_settings(folder)
        codec.read_statistics(folder)

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        return token_shift(scheduler)

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> QwenImageTransformer:
        config = read_transformer_config(folder)
        with torch.device("meta"):
            return QwenImageTransformer(config, read_geometry(folder), policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return load_text_encoder(folder, device, dtype)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> QwenImageTransformer:
        assert isinstance(transformer, QwenImageTransformer)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            load_weights(transformer, checkpoint, transformer_pieces(transformer.config), device, dtype)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)
