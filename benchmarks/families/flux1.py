"""FLUX.1 [dev] at its real size: config.json of black-forest-labs/FLUX.1-dev, one 1024 x 1024 picture."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.layers.embeddings import patchify, unpatchify
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions

_CONFIG: dict[str, Any] = {
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
_NUM_TEXT_TOKENS = 512
_PATCH, _GRID = (1, 2, 2), (1, 64, 64)
# Not the default 3.5, and a timestep of 500: diffusers rounds a thousand times either to bfloat16, which holds these.
_GUIDANCE, _TIMESTEP = 4.0, 500.0


def _inputs(device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(1, 16, 1, 128, 128, generator=generator, device=device, dtype=dtype)
    text = torch.randn(1, _NUM_TEXT_TOKENS, 4096, generator=generator, device=device, dtype=dtype)
    pooled = torch.randn(1, 768, generator=generator, device=device, dtype=dtype)
    timestep = torch.full((1,), _TIMESTEP, device=device)
    places = torch.cartesian_prod(*(torch.arange(size, device=device, dtype=torch.float32) for size in _GRID))
    theirs = {
        "hidden_states": patchify(latents, _PATCH),
        "timestep": timestep / 1000,
        "guidance": torch.full((1,), _GUIDANCE, device=device),
        "pooled_projections": pooled,
        "encoder_hidden_states": text,
        "txt_ids": torch.zeros(_NUM_TEXT_TOKENS, 3, device=device),
        "img_ids": places,
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text, pooled=pooled), ClipSize(1024, 1024, 1, 1), guidance=_GUIDANCE)
    return StepInputs(
        (latents, timestep, inputs), theirs, lambda out: unpatchify(out[0], _GRID, _PATCH, channels_first=True)
    )


STEPS = (
    FamilyStep(
        "FLUX.1 [dev], 1024 x 1024",
        "FluxTransformer2DModel",
        _CONFIG,
        _inputs,
        vae_config={"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    ),
)
