"""Qwen-Image at its real size: config.json of Qwen/Qwen-Image, both guidance branches of one 1328 x 1328 picture."""

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
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
}
# A prompt of a few sentences, and a space, each with the five tokens of the template behind it.
_LENGTHS = (120, 6)
_PATCH, _GRID = (1, 2, 2), (1, 83, 83)
# A timestep whose thousandth bfloat16 holds: diffusers rounds it.
_TIMESTEP = 500.0


def _inputs(device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    one = torch.randn(1, 16, 1, 166, 166, generator=generator, device=device, dtype=dtype)
    latents = one.repeat(2, 1, 1, 1, 1)
    lengths = torch.tensor(_LENGTHS, device=device)
    is_real = torch.arange(max(_LENGTHS), device=device)[None] < lengths[:, None]
    text = torch.randn(2, max(_LENGTHS), 3584, generator=generator, device=device, dtype=dtype) * is_real[..., None]
    timestep = torch.full((2,), _TIMESTEP, device=device)
    theirs = {
        "hidden_states": patchify(latents, _PATCH),
        "timestep": timestep / 1000,
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": is_real,
        "img_shapes": [[_GRID]] * 2,
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text, _LENGTHS), ClipSize(1328, 1328, 1, 1))
    return StepInputs(
        (latents, timestep, inputs), theirs, lambda out: unpatchify(out[0], _GRID, _PATCH, channels_first=True)
    )


STEPS = (
    FamilyStep(
        "Qwen-Image, 1328 x 1328, both branches",
        "QwenImageTransformer2DModel",
        _CONFIG,
        _inputs,
        vae_config={"z_dim": 16, "temperal_downsample": [False, True, True]},
    ),
)
