"""Wan at its real sizes: config.json of the published transformers, five seconds each. Of Wan 2.2 I2V-A14B one expert,
which makes a step by itself."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
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


_CONFIG_A14B: dict[str, Any] = {
    **_SHARED,
    "num_attention_heads": 40,
    "num_layers": 40,
    "ffn_dim": 13824,
    "in_channels": 36,
    "out_channels": 16,
}
# Of CLIP: 256 patches of an image and the token of its class.
_NUM_IMAGE_TOKENS, _IMAGE_DIM = 257, 1280
_CONFIG_I2V_14B: dict[str, Any] = {**_CONFIG_A14B, "added_kv_proj_dim": 5120, "image_dim": _IMAGE_DIM}
_FROM_IMAGE = {"_class_name": "WanImageToVideoPipeline"}


def _inputs(
    size: ClipSize,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    condition_channels: int = 0,
    num_image_tokens: int = 0,
) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    latents, text = random(1, *shape), random(1, 512, 4096)
    timestep = torch.full((1,), 700.0, device=device)
    theirs = {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text, "return_dict": False}
    image = None
    if condition_channels:
        tokens = random(1, num_image_tokens, _IMAGE_DIM) if num_image_tokens else None
        image = ImageCondition(random(1, condition_channels, *shape[1:]), tokens)
        theirs["hidden_states"] = torch.cat([latents, image.latents], dim=1)
        theirs["encoder_hidden_states_image"] = tokens
    inputs = DenoiserInputs(Conditions.of(text), size, image=image)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: out[0])


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
    FamilyStep(
        "Wan 2.2 I2V A14B, 480 x 832, 81 frames",
        "WanTransformer3DModel",
        _CONFIG_A14B,
        lambda device, dtype: _inputs(
            ClipSize(480, 832, 81, 16), (16, 21, 60, 104), device, dtype, condition_channels=20
        ),
        index=_FROM_IMAGE,
    ),
    FamilyStep(
        "Wan 2.1 I2V 14B, 480 x 832, 81 frames",
        "WanTransformer3DModel",
        _CONFIG_I2V_14B,
        lambda device, dtype: _inputs(
            ClipSize(480, 832, 81, 16),
            (16, 21, 60, 104),
            device,
            dtype,
            condition_channels=20,
            num_image_tokens=_NUM_IMAGE_TOKENS,
        ),
        index=_FROM_IMAGE,
    ),
)
