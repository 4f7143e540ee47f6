"""Samplers of few-step models that estimate the data and add fresh noise at every step: DMD2 (distribution matching
distillation, Yin et al., arXiv:2405.14867) and rCM (score-regularized consistency model, arXiv:2510.08431).

x0 = x - sigma[i] * v(x, sigma[i]);   x = (1 - sigma[i+1]) * x0 + sigma[i+1] * eps, eps fresh normal noise;   x = x0 at
the last step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.denoising.level_sampler import Draw, Estimate, History, LevelSampler


def renoised(data: torch.Tensor, level: float, fresh: torch.Tensor) -> torch.Tensor:
    """Return an estimate of the data at a noise level sigma. fresh: normal noise."""
    return (1 - level) * data + level * fresh


@dataclass(frozen=True)
class DmdSampler(LevelSampler):
    """The loop above."""

    def advance(
        self, latents: torch.Tensor, levels: tuple[float, ...], history: History, estimate: Estimate, draw: Draw
    ) -> torch.Tensor:
        del history
        *_, level, following = levels
        data = estimate(latents, level)
        return renoised(data, following, draw()) if following > 0 else data


@dataclass(frozen=True)
class RcmSampler(DmdSampler):
    """The same from noise times the first noise level, as TurboDiffusion starts."""

    def begin(self, noise: torch.Tensor) -> torch.Tensor:
        return noise * self.levels[0]

    def from_step(self, first: int) -> LevelSampler:
        levels = self.levels[first:]
        return DmdSampler(len(levels), options=self.options, sigmas=levels)
