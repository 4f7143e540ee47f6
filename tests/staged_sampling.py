"""The steps of progressive resolution, stage after stage, as the denoiser runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.denoising.interface import OnStep, Predict, Sampler
from diffusion_runtime.denoising.progressive_resolution import DrawNoiseOf, Stage, stage_samplers


def sample_in_stages(
    sampler: Sampler,
    stages: Sequence[Stage],
    noise: torch.Tensor,
    predicts: Sequence[Predict],
    draw_noise: DrawNoiseOf,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """The clean latents at full size, float32. noise: in the size of the first stage. predicts: of each stage."""
    latents = noise
    for stage, predict in zip(stage_samplers(sampler, stages), predicts, strict=True):
        latents = stage.run(stage.start(stage.grown(latents, draw_noise)), predict, on_step).latents
    return latents
