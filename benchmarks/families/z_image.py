"""Z-Image-Turbo at its real size: config.json of the published transformer, one 1024 x 1024 picture."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions

_CONFIG: dict[str, Any] = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "cap_feat_dim": 2560,
    "dim": 3840,
    "in_channels": 16,
    "n_heads": 30,
    "n_kv_heads": 30,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}
_NUM_TEXT_TOKENS = 100


def _inputs(device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(1, 16, 1, 128, 128, generator=generator, device=device, dtype=dtype)
    text = torch.randn(1, _NUM_TEXT_TOKENS, 2560, generator=generator, device=device, dtype=dtype)
    timestep = torch.full((1,), 700.0, device=device)
    theirs = {"x": list(latents), "t": (1000 - timestep) / 1000, "cap_feats": list(text), "return_dict": False}
    inputs = DenoiserInputs(Conditions.of(text), ClipSize(1024, 1024, 1, 1))
    return StepInputs((latents, timestep, inputs), theirs, lambda out: -torch.stack(out[0]))


STEPS = (
    FamilyStep(
        "Z-Image-Turbo, 1024 x 1024",
        "ZImageTransformer2DModel",
        _CONFIG,
        _inputs,
        vae_config={"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
    ),
)
