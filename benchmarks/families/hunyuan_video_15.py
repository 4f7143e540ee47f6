"""HunyuanVideo-1.5 at its real size: config.json of hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v, one
guidance branch of five seconds, which is how diffusers' pipeline runs them."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

_CONFIG: dict[str, Any] = {
    "in_channels": 65,
    "out_channels": 32,
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm",
    "text_embed_dim": 3584,
    "text_embed_2_dim": 1472,
    "image_embed_dim": 1152,
    "rope_theta": 256.0,
    "rope_axes_dim": [16, 56, 56],
    "target_size": 640,
    "task_type": "t2v",
    "use_meanflow": False,
}
# A prompt of a few sentences with a word to write; diffusers fills both up, and adds 729 tokens of no image, and masks
# all of them.
_NUM_TOKENS, _ROOM = 120, 1000
_NUM_GLYPHS, _GLYPH_ROOM = 20, 256
_NUM_IMAGE_TOKENS = 729
# One that bfloat16 holds: diffusers' pipeline rounds it.
_TIMESTEP = 704.0


def _inputs(size: ClipSize, device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def is_real(room: int, num_tokens: int) -> torch.Tensor:
        return (torch.arange(room, device=device) < num_tokens).to(dtype)[None]

    latents = random(1, 32, (size.num_frames - 1) // 4 + 1, size.height // 16, size.width // 16)
    text = random(1, _ROOM, 3584) * is_real(_ROOM, _NUM_TOKENS)[..., None]
    glyphs = random(1, _GLYPH_ROOM, 1472) * is_real(_GLYPH_ROOM, _NUM_GLYPHS)[..., None]
    timestep = torch.full((1,), _TIMESTEP, device=device)
    no_image = torch.zeros(1, 33, *latents.shape[2:], device=device, dtype=dtype)
    theirs = {
        "hidden_states": torch.cat([latents, no_image], dim=1),
        "timestep": timestep.to(dtype),
        "encoder_hidden_states": text,
        "encoder_attention_mask": is_real(_ROOM, _NUM_TOKENS),
        "encoder_hidden_states_2": glyphs,
        "encoder_attention_mask_2": is_real(_GLYPH_ROOM, _NUM_GLYPHS),
        "image_embeds": torch.zeros(1, _NUM_IMAGE_TOKENS, 1152, device=device, dtype=dtype),
        "return_dict": False,
    }
    conditions = Conditions.of(text, (_NUM_TOKENS,), further=[TextStream(glyphs, (_NUM_GLYPHS,))])
    inputs = DenoiserInputs(conditions, size)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: out[0])


STEPS = (
    FamilyStep(
        "HunyuanVideo-1.5, 480 x 848, 121 frames",
        "HunyuanVideo15Transformer3DModel",
        _CONFIG,
        lambda device, dtype: _inputs(ClipSize(480, 848, 121, 24), device, dtype),
        vae_config={"latent_channels": 32},
    ),
)
