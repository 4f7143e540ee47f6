"""Normal noise of a generation from per-sample seeds: the initial noise, and fresh noise between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SampleNoise:
    """Standard normal noise of a batch, every sample drawn by its own CPU generator: a seed gives the same noise on
    every device, in every dtype, in every batch and on any number of processes.

    latent_shape: of one sample. seeds: one per sample.
    """

    def __init__(self, latent_shape: Sequence[int], seeds: Sequence[int]) -> None:
        self._shape = (1, *latent_shape)
        self._generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]

    def draw(self) -> torch.Tensor:
        """[len(seeds), *latent_shape], float32, on the CPU: the initial noise at the first call, other numbers at each
        later one."""
        return self.draw_of(self._shape[1:])

    def draw_of(self, latent_shape: Sequence[int]) -> torch.Tensor:
        """`draw` in another shape."""
        return torch.cat([torch.randn((1, *latent_shape), generator=generator) for generator in self._generators])


def initial_noise(latent_shape: Sequence[int], seeds: Sequence[int]) -> torch.Tensor:
    """Standard normal noise [len(seeds), *latent_shape], float32, on the CPU: the first of `SampleNoise`."""
    return SampleNoise(latent_shape, seeds).draw()
