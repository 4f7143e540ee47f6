"""The FLUX.1 family: its settings, and how the parts of a FLUX.1 folder are built and loaded."""

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
from diffusion_runtime.models.flux1 import codec
from diffusion_runtime.models.flux1.config import read_geometry, read_transformer_config
from diffusion_runtime.models.flux1.text import load_text_encoder
from diffusion_runtime.models.flux1.transformer import Flux1Transformer
from diffusion_runtime.models.flux1.weights import transformer_pieces
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder, ModelFamily
from diffusion_runtime.text_encoders.interface import TextEncoder

# Tokens of T5: models distilled to few steps, which take no guidance scale, were trained on shorter prompts.
_MAX_TOKENS, _MAX_TOKENS_FEW_STEPS = 512, 256


class Flux1Family(ModelFamily):
    """FLUX.1 text-to-image: [dev], which takes the guidance scale as an input, and [schnell], which runs without."""

    name = "flux1"
    transformer_classes = ("FluxTransformer2DModel",)
    pipeline_classes = ("FluxPipeline",)
    diffusers_components = (codec.AUTOENCODER,)
    roles = (("self", "self"),)
    # Those of FLUX.1 [dev], as its authors document them.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 1024,
        "width": 1024,
        "num_frames": 1,
        "fps": 1,
        "num_inference_steps": 50,
        "guidance_scale": 3.5,
        "sampler": "flow_match_euler",
        "guidance_mode": "batched",
    }

    def check_settings(self, folder: Path) -> None:
        super().check_settings(folder)
        codec.read_normalisation(folder)

    def request_defaults(self, folder: Path) -> Mapping[str, Any]:
        """Without an embedded scale: the four steps of FLUX.1 [schnell], and no guidance."""
        if self.embeds_guidance(folder):
            return self.defaults
        return {**self.defaults, "num_inference_steps": 4, "guidance_scale": 1.0}

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        return token_shift(scheduler)

    def embeds_guidance(self, folder: Path) -> bool:
        return read_transformer_config(folder).embeds_guidance

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> Flux1Transformer:
        config = read_transformer_config(folder)
        with torch.device("meta"):
            return Flux1Transformer(config, read_geometry(folder), policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        max_tokens = _MAX_TOKENS if self.embeds_guidance(folder) else _MAX_TOKENS_FEW_STEPS
        return load_text_encoder(folder, device, dtype, max_tokens)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> Flux1Transformer:
        assert isinstance(transformer, Flux1Transformer)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            load_weights(transformer, checkpoint, transformer_pieces(transformer.config), device, dtype)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)
