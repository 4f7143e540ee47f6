"""Samplers of few-step models that estimate the data and add fresh noise at every step: DMD2 (distribution matching
distillation, Yin et al., arXiv:2405.14867) and rCM (score-regularized consistency model, arXiv:2510.08431).

x0 = x - sigma[i] * v(x, sigma[i]);   x = (1 - sigma[i+1]) * x0 + sigma[i+1] * eps, eps fresh normal noise;   x = x0 at
the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import LinearSigmas, shifted
from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler

_NUM_TRAIN_TIMESTEPS = 1000


def precision_on(device: torch.device) -> torch.dtype:
    """Return the dtype of the latents between predictions. Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def renoised(data: torch.Tensor, level: float, fresh: torch.Tensor) -> torch.Tensor:
    """Return an estimate of the data at a noise level sigma. fresh: normal noise."""
    return (1 - level) * data + level * fresh


@dataclass(frozen=True)
class DmdSampler(Sampler):
    """The loop above, in float64 between the predictions.

    num_steps: predictions; flow_shift: s of sigma = s * t / (1 + (s - 1) * t). options: of them num_train_timesteps
    counts, which makes timesteps of noise levels. sigmas: t of every step, None for linear ones.
    """

    num_steps: int
    flow_shift: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] | None = None

    # Whether the latents start as noise times the first noise level, not as noise.
    scales_start: ClassVar[bool] = False

    @property
    def levels(self) -> tuple[float, ...]:
        """sigma of every step."""
        unshifted = LinearSigmas().sigmas(self.num_steps) if self.sigmas is None else self.sigmas
        return tuple(shifted(level, self.flow_shift) for level in unshifted)

    @property
    def num_train_timesteps(self) -> int:
        """Timesteps of noise level 1."""
        return int(self.options.get("num_train_timesteps", _NUM_TRAIN_TIMESTEPS))

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:  # noqa: ARG002
        levels, num_timesteps = (*self.levels, 0.0), self.num_train_timesteps
        return tuple(
            StepInfo(
                index,
                self.num_steps,
                timestep=num_timesteps * level,
                sigma=level,
                next_timestep=num_timesteps * levels[index + 1],
            )
            for index, level in enumerate(levels[:-1])
        )

    def sample(
        self,
        noise: torch.Tensor,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,
    ) -> torch.Tensor:
        assert draw_noise is not None or self.num_steps == 1, "this sampler adds noise: give it draw_noise"
        levels = (*self.levels, 0.0)
        precision = precision_on(noise.device)
        latents = noise.to(precision)
        if self.scales_start:
            latents = latents * levels[0]
        for step, level, following in zip(self.steps(noise.device), levels[:-1], levels[1:], strict=True):
            velocity = predict(latents.float(), step).to(precision)
            latents = latents - level * velocity
            if following > 0:
                assert draw_noise is not None
                fresh = draw_noise().to(latents.device, precision)
                latents = renoised(latents, following, fresh)
            if on_step is not None:
                on_step(step, latents.float())
        return latents.float()


@dataclass(frozen=True)
class RcmSampler(DmdSampler):
    """The same from noise times the first noise level, as TurboDiffusion starts."""

    scales_start: ClassVar[bool] = True
