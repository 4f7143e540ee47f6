"""HunyuanVideo at its real size: config.json of hunyuanvideo-community/HunyuanVideo, at its documented size and at the
smaller one of diffusers' example."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions

_CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 20,
    "num_single_layers": 40,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 2,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "guidance_embeds": True,
    "text_embed_dim": 4096,
    "pooled_projection_dim": 768,
    "rope_theta": 256.0,
    "rope_axes_dim": [16, 56, 56],
}
# A prompt of a few sentences; diffusers fills it up to 256 tokens and masks them.
_NUM_TOKENS, _ROOM = 80, 256
_GUIDANCE = 6.0


def _inputs(size: ClipSize, device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, 16, (size.num_frames - 1) // 4 + 1, size.height // 8, size.width // 8)
    latents = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    is_real = (torch.arange(_ROOM, device=device) < _NUM_TOKENS).to(dtype)[None]
    text = torch.randn(1, _ROOM, 4096, generator=generator, device=device, dtype=dtype) * is_real[..., None]
    pooled = torch.randn(1, 768, generator=generator, device=device, dtype=dtype)
    timestep = torch.full((1,), 700.0, device=device)
    theirs = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": text,
        "encoder_attention_mask": is_real,
        "pooled_projections": pooled,
        "guidance": torch.tensor([_GUIDANCE], device=device, dtype=dtype) * 1000,
        "return_dict": False,
    }
    conditions = Conditions.of(text, (_NUM_TOKENS,), pooled=pooled)
    inputs = DenoiserInputs(conditions, size, guidance=_GUIDANCE)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: out[0])


STEPS = (
    FamilyStep(
        "HunyuanVideo, 720 x 1280, 129 frames",
        "HunyuanVideoTransformer3DModel",
        _CONFIG,
        lambda device, dtype: _inputs(ClipSize(720, 1280, 129, 24), device, dtype),
    ),
    FamilyStep(
        "HunyuanVideo, 320 x 512, 61 frames",
        "HunyuanVideoTransformer3DModel",
        _CONFIG,
        lambda device, dtype: _inputs(ClipSize(320, 512, 61, 24), device, dtype),
    ),
)
