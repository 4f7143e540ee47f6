"""Wan at its real sizes: config.json of the published 2.1 1.3B and 2.2 TI2V-5B transformers, five seconds each."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions

_SHARED: dict[str, Any] = {
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "freq_dim": 256,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
_CONFIG_1_3B: dict[str, Any] = {
    **_SHARED,
    "num_attention_heads": 12,
    "num_layers": 30,
    "ffn_dim": 8960,
    "in_channels": 16,
    "out_channels": 16,
}
_CONFIG_5B: dict[str, Any] = {
    **_SHARED,
    "num_attention_heads": 24,
    "num_layers": 30,
    "ffn_dim": 14336,
    "in_channels": 48,
    "out_channels": 48,
}


def _inputs(size: ClipSize, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(1, *shape, generator=generator, device=device, dtype=dtype)
    text = torch.randn(1, 512, 4096, generator=generator, device=device, dtype=dtype)
    timestep = torch.full((1,), 700.0, device=device)
    theirs = {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text, "return_dict": False}
    return StepInputs((latents, timestep, DenoiserInputs(Conditions.of(text), size)), theirs, lambda out: out[0])


STEPS = (
    FamilyStep(
        "Wan 2.1 1.3B, 480 x 832, 81 frames",
        "WanTransformer3DModel",
        _CONFIG_1_3B,
        lambda device, dtype: _inputs(ClipSize(480, 832, 81, 16), (16, 21, 60, 104), device, dtype),
    ),
    FamilyStep(
        "Wan 2.2 TI2V 5B, 704 x 1280, 121 frames",
        "WanTransformer3DModel",
        _CONFIG_5B,
        lambda device, dtype: _inputs(ClipSize(704, 1280, 121, 24), (48, 31, 44, 80), device, dtype),
        vae_config={"z_dim": 48, "scale_factor_spatial": 16},
        index={"expand_timesteps": True},
    ),
)
