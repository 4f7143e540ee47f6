"""The Z-Image family: its settings, and how the parts of a Z-Image folder are built and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig, read_scheduler_config
from diffusion_runtime.denoising.token_shift import token_shift
from diffusion_runtime.models.checkpoint import Checkpoint, WeightChange, load_weights
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder, ModelFamily
from diffusion_runtime.models.z_image import codec
from diffusion_runtime.models.z_image.config import read_geometry, read_transformer_config
from diffusion_runtime.models.z_image.text import load_text_encoder
from diffusion_runtime.models.z_image.transformer import TEXT_ROLE, ZImageTransformer
from diffusion_runtime.models.z_image.weights import transformer_pieces
from diffusion_runtime.text_encoders.interface import TextEncoder

# Of Z-Image. Z-Image-Turbo has 3.
_BASE_FLOW_SHIFT = 6.0


class ZImageFamily(ModelFamily):
    """Z-Image text-to-image."""

    name = "z_image"
    transformer_classes = ("ZImageTransformer2DModel",)
    # The refiner of the text has no grid: backends that need one pass over it, as over any cross-attention.
    pipeline_classes = ("ZImagePipeline",)
    diffusers_components = (codec.AUTOENCODER,)
    roles = (("self", "self"), (TEXT_ROLE, "cross"))
    # cond + scale * (cond - uncond): 0 turns guidance off, where other models say 1.
    guidance_offset = 1.0
    # Those of Z-Image-Turbo, as its authors document them: eight steps, and no guidance.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 1024,
        "width": 1024,
        "num_frames": 1,
        "fps": 1,
        "num_inference_steps": 8,
        "guidance_scale": 0.0,
        "sampler": "flow_match_euler",
        "guidance_mode": "batched",
    }
    # Those of Z-Image, which is not distilled.
    base_defaults: ClassVar[Mapping[str, Any]] = {"num_inference_steps": 50, "guidance_scale": 4.0}

    def check_settings(self, folder: Path) -> None:
        super().check_settings(folder)
        codec.read_normalisation(folder)

    def request_defaults(self, folder: Path) -> Mapping[str, Any]:
        """Those of the model before distillation where the scheduler has its flow shift: published folders of the two
        differ in nothing else that can be read."""
        shift = read_scheduler_config(folder).defaults.get("flow_shift")
        return {**self.defaults, **self.base_defaults} if shift == _BASE_FLOW_SHIFT else self.defaults

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        return token_shift(scheduler)

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> ZImageTransformer:
        config = read_transformer_config(folder)
        with torch.device("meta"):
            return ZImageTransformer(config, read_geometry(folder), policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return load_text_encoder(folder, device, dtype)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> ZImageTransformer:
        assert isinstance(transformer, ZImageTransformer)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            load_weights(transformer, checkpoint, transformer_pieces(transformer.config), device, dtype)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)
