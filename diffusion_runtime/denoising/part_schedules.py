"""Schedules of parts: a sound whose noise levels are those of the pictures, shifted again.

Both are noised from 1 to 0 in the same steps, with flow shifts of their own (Esser et al., arXiv:2403.03206). A
sampler integrates one tensor along the pictures' levels. Its Euler steps, x + (sigma' - sigma) * v, are those of the
sound's own schedule where the sound's velocity is multiplied by (tau' - tau) / (sigma' - sigma), tau and tau' being its
levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import LinearSigmas, shifted
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.errors import RequestError

_TRAINED_TIMESTEPS = 1000.0
_SAMPLER = "flow_match_euler"


@dataclass(frozen=True)
class ScheduleOfParts(LinearSigmas):
    """Schedule of a model whose sound has another flow shift than its pictures."""

    def check_sampler(self, name: str) -> None:
        if name != _SAMPLER:
            raise RequestError(
                f"sampler: expected {_SAMPLER}, got {name}: pictures and sound of this model have noise levels of "
                "their own, which Euler steps alone take"
            )


def with_schedule_of_sound(predict: Predict, geometry: LatentGeometry, size: ClipSize, shift: float) -> Predict:
    """Return a prediction whose sound moves along its own noise levels in Euler steps. predict: the velocity of each
    part by its own levels. shift: from the pictures' levels to the sound's."""

    def of_parts(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        velocity = predict(latents, step)
        assert step.sigma is not None
        after = (step.next_timestep or 0.0) / _TRAINED_TIMESTEPS
        width = shifted(step.sigma, shift) - shifted(after, shift)
        parts = geometry.parts(velocity, size)
        assert parts.audio is not None
        return geometry.join(parts.video, parts.audio * (width / (step.sigma - after)))

    return of_parts
