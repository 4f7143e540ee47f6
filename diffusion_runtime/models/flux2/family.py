"""The FLUX.2 family: its settings, and how the parts of a FLUX.2 folder are built and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.flow_schedule import FlowSchedule
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.models.checkpoint import Checkpoint, WeightChange, load_weights
from diffusion_runtime.models.flux2 import codec
from diffusion_runtime.models.flux2.config import (
    DEV,
    KLEIN,
    read_geometry,
    read_pipeline_config,
    read_transformer_config,
)
from diffusion_runtime.models.flux2.schedule import read_schedule
from diffusion_runtime.models.flux2.text import load_text_encoder
from diffusion_runtime.models.flux2.transformer import Flux2Transformer
from diffusion_runtime.models.flux2.weights import transformer_pieces
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder, ModelFamily
from diffusion_runtime.text_encoders.interface import TextEncoder


class Flux2Family(ModelFamily):
    """FLUX.2 text-to-image: [dev], which takes the guidance scale as an input, and [klein], which has two branches of
    guidance, or none where it is distilled to four steps. Neither edits pictures here."""

    name = "flux2"
    transformer_classes = ("Flux2Transformer2DModel",)
    pipeline_classes = (DEV, KLEIN)
    index_keys = ("is_distilled",)
    diffusers_components = (codec.AUTOENCODER,)
    roles = (("self", "self"),)
    # Those of FLUX.2 [dev] and of [klein] before distillation, as their authors document them.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 1024,
        "width": 1024,
        "num_frames": 1,
        "fps": 1,
        "num_inference_steps": 50,
        "guidance_scale": 4.0,
        "sampler": "flow_match_euler",
        "guidance_mode": "batched",
    }

    def request_defaults(self, folder: Path) -> Mapping[str, Any]:
        """Distilled: four steps and no guidance."""
        if read_pipeline_config(folder).is_distilled:
            return {**self.defaults, "num_inference_steps": 4, "guidance_scale": 1.0}
        return self.defaults

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        return read_schedule(scheduler)

    def embeds_guidance(self, folder: Path) -> bool:
        return read_transformer_config(folder).embeds_guidance

    def takes_guidance(self, folder: Path) -> bool:
        return not read_pipeline_config(folder).is_distilled

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> Flux2Transformer:
        config = read_transformer_config(folder)
        with torch.device("meta"):
            return Flux2Transformer(config, read_geometry(folder), policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return load_text_encoder(folder, device, dtype)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> Flux2Transformer:
        assert isinstance(transformer, Flux2Transformer)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            load_weights(transformer, checkpoint, transformer_pieces(transformer.config), device, dtype)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)
