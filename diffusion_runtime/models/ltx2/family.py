"""The LTX-2 family: its settings, and how the parts of an LTX-2 folder are built and loaded.

What it runs is the first stage of LTX-2.0, which is whole by itself: a video and its sound at the size that was asked
for, by classifier-free guidance of one scale for both. Not here: upsampling and the second stage behind it; images to
start from; the further terms of guidance that diffusers' LTX2Pipeline has had since LTX-2.3 (perturbed attention,
isolated modalities, a scale of the sound's own, rescaling), which take more forward passes a step or numbers that a
request does not have. What a request can say gives what that pipeline gives with stg_scale 0, modality_scale 1 and
guidance_rescale 0, and the sound's own three the same, audio_guidance_scale that of the video.
"""

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
from diffusion_runtime.models.ltx2 import codec, text
from diffusion_runtime.models.ltx2.block import (
    AUDIO_CROSS_ROLE,
    AUDIO_SELF_ROLE,
    AUDIO_TO_VIDEO_ROLE,
    VIDEO_TO_AUDIO_ROLE,
)
from diffusion_runtime.models.ltx2.config import read_geometry, read_transformer_config
from diffusion_runtime.models.ltx2.transformer import LTX2Transformer
from diffusion_runtime.models.ltx2.weights import pair_channels, stays_float32, transformer_pieces
from diffusion_runtime.text_encoders.interface import TextEncoder


class LTX2Family(ModelFamily):
    """LTX-2 text-to-video with sound. All but the video's self-attention counts as `cross`: it has no grid of queries
    and keys, so sparse choices pass over it."""

    name = "ltx2"
    transformer_classes = ("LTX2VideoTransformer3DModel",)
    pipeline_classes = ("LTX2Pipeline",)
    diffusers_components = (codec.VIDEO_AUTOENCODER, codec.AUDIO_AUTOENCODER, codec.VOCODER_NETWORK, text.CONNECTORS)
    roles = (
        ("self", "self"),
        ("cross", "cross"),
        (AUDIO_SELF_ROLE, "cross"),
        (AUDIO_CROSS_ROLE, "cross"),
        (AUDIO_TO_VIDEO_ROLE, "cross"),
        (VIDEO_TO_AUDIO_ROLE, "cross"),
    )
    # Five seconds at 24 frames a second, as its authors document the first stage.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 512,
        "width": 768,
        "num_frames": 121,
        "fps": 24,
        "num_inference_steps": 40,
        "guidance_scale": 4.0,
        "sampler": "flow_match_euler",
        "guidance_mode": "batched",
    }

    def check_settings(self, folder: Path) -> None:
        super().check_settings(folder)
        codec.check_decoding(folder)
        text.check_connectors(folder)

    def schedule(self, folder: Path, scheduler: SchedulerConfig) -> FlowSchedule:
        return token_shift(scheduler)

    def num_shared_heads(self, folder: Path) -> int:
        return read_transformer_config(folder).video.num_heads

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> LTX2Transformer:
        config, geometry = read_transformer_config(folder), read_geometry(folder)
        with torch.device("meta"):
            return LTX2Transformer(config, geometry, policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return text.load_text_encoder(folder, device, dtype)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> LTX2Transformer:
        assert isinstance(transformer, LTX2Transformer)
        pieces = transformer_pieces(transformer.config)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            load_weights(transformer, checkpoint, pieces, device, dtype, stays_float32=stays_float32)
        if transformer.config.turns_halves:
            pair_channels(transformer)
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)
