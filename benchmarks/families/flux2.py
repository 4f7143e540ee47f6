"""FLUX.2 [dev] and [klein] 9B at their real sizes: config.json of black-forest-labs/FLUX.2-dev and FLUX.2-klein-9B, one
1024 x 1024 picture."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.layers.embeddings import patchify, unpatchify
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions

_DEV: dict[str, Any] = {
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "eps": 1e-6,
    "guidance_embeds": True,
    "in_channels": 128,
    "joint_attention_dim": 15360,
    "mlp_ratio": 3.0,
    "num_attention_heads": 48,
    "num_layers": 8,
    "num_single_layers": 48,
    "patch_size": 1,
    "rope_theta": 2000,
    "timestep_guidance_channels": 256,
}
_KLEIN: dict[str, Any] = {
    **_DEV,
    "guidance_embeds": False,
    "joint_attention_dim": 12288,
    "num_attention_heads": 32,
    "num_single_layers": 24,
}
_VAE: dict[str, Any] = {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512], "patch_size": [2, 2]}
# All of them are attended, padding too.
_NUM_TEXT_TOKENS = 512
_PATCH, _GRID = (1, 1, 1), (1, 64, 64)
# A scale and a timestep that bfloat16 holds a thousand times exactly: diffusers rounds both.
_GUIDANCE, _TIMESTEP = 4.0, 500.0


def _inputs(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(1, 128, *_GRID, generator=generator, device=device, dtype=dtype)
    text_dim = config["joint_attention_dim"]
    text = torch.randn(1, _NUM_TEXT_TOKENS, text_dim, generator=generator, device=device, dtype=dtype)
    timestep = torch.full((1,), _TIMESTEP, device=device)
    guidance = _GUIDANCE if config["guidance_embeds"] else None
    theirs = {
        "hidden_states": patchify(latents, _PATCH),
        "timestep": timestep / 1000,
        "guidance": None if guidance is None else torch.full((1,), guidance, device=device),
        "encoder_hidden_states": text,
        "txt_ids": _places((1, 1, 1, _NUM_TEXT_TOKENS), device),
        "img_ids": _places((*_GRID, 1), device),
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text), ClipSize(1024, 1024, 1, 1), guidance=guidance)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: unpatchify(out[0], _GRID, _PATCH))


def _places(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[tokens, 4]: where each token is on the four axes."""
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))


STEPS = (
    FamilyStep(
        "FLUX.2 [dev], 1024 x 1024",
        "Flux2Transformer2DModel",
        _DEV,
        lambda device, dtype: _inputs(_DEV, device, dtype),
        vae_config=_VAE,
    ),
    FamilyStep(
        "FLUX.2 [klein] 9B, 1024 x 1024",
        "Flux2Transformer2DModel",
        _KLEIN,
        lambda device, dtype: _inputs(_KLEIN, device, dtype),
        vae_config=_VAE,
        index={"_class_name": "Flux2KleinPipeline"},
    ),
)
