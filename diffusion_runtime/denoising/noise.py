"""Initial noise of a generation, from per-sample seeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def initial_noise(latent_shape: Sequence[int], seeds: Sequence[int]) -> torch.Tensor:
    """Standard normal noise [len(seeds), *latent_shape], float32, on the CPU.

    Every sample is drawn by its own CPU generator, so a seed gives the same noise on every device, in every dtype and
    in every batch.
    """
    shape = (1, *latent_shape)
    samples = [torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)) for seed in seeds]
    return torch.cat(samples)
