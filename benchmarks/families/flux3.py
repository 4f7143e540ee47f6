"""FLUX.3 Image [klein] before distillation at its real size: config.json of the published transformer, one 1024 x 1024
picture from text, and with one of that size to edit."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize, ImageGeometry
from diffusion_runtime.diffusers_bridge.sample_inputs import StepSample, step_inputs

_CLASS = "Flux3Transformer2DModel"
_CONFIG: dict[str, Any] = {
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "cond_in_channels": 128,
    "eps": 1e-6,
    "flow_map": False,
    "in_channels": 128,
    "joint_attention_dim": 20480,
    "mlp_ratio": 3.0,
    "num_attention_heads": 24,
    "num_layers": 5,
    "num_single_layers": 28,
    "rope_theta": 10000,
    "timestep_channels": 256,
}
_VAE: dict[str, Any] = {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512], "patch_size": [2, 2]}


def _inputs(num_images: int, device: torch.device, dtype: torch.dtype) -> StepInputs:
    geometry = ImageGeometry(num_channels=128, spatial_factor=16, temporal_factor=1, patch=(1, 1, 1))
    generator = torch.Generator(device).manual_seed(0)
    size = ClipSize(1024, 1024, 1, 1)
    made = step_inputs(_CLASS, StepSample(_CONFIG, geometry, size, 1, device, dtype, generator, num_images=num_images))
    return StepInputs(made.ours, made.theirs, made.theirs_to_velocity)


STEPS = tuple(
    FamilyStep(
        f"FLUX.3 Image [klein] base, 1024 x 1024{', 1 image' * num_images}",
        _CLASS,
        _CONFIG,
        lambda device, dtype, num_images=num_images: _inputs(num_images, device, dtype),
        vae_config=_VAE,
        index={"_class_name": "Flux3Pipeline"},
    )
    for num_images in (0, 1)
)
