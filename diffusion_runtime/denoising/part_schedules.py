"""Schedules of parts: a sound whose noise levels are those of the pictures, shifted again.

Both are noised from 1 to 0 in the same steps, with flow shifts of their own (Esser et al., arXiv:2403.03206). A
sampler integrates one tensor along the pictures' levels. Its Euler steps, x + (sigma' - sigma) * v, are those of the
sound's own schedule where the sound's velocity is multiplied by (tau' - tau) / (sigma' - sigma), tau and tau' being its
levels.

Other samplers take the sound as it is carried along the pictures' levels: multiplied by sigma / tau, noise and data
mixed at tau are noise and the data times a constant mixed at sigma, as ComfyUI has it. Their last step ends at the data
times that constant, the pictures' flow shift over the sound's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import LinearSigmas, shifted
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.request.strength import reads_initial

_TRAINED_TIMESTEPS = 1000.0
_EULER = "flow_match_euler"


@dataclass(frozen=True)
class ScheduleOfParts(LinearSigmas):
    """Schedule of a model whose sound has another flow shift than its pictures."""

    def check_sampler(self, name: str) -> None:
        """Refuse samplers that are not told the noise levels, and that of flow maps. Raises RequestError."""
        known = [each for each, declared in SAMPLERS.items() if declared.takes_levels and each != "flow_map_euler"]
        if name not in known:
            raise RequestError(
                f"sampler: expected {', '.join(known)}, got {name}: pictures and sound of this model have noise levels "
                "of their own"
            )


def with_schedule_of_sound(predict: Predict, geometry: LatentGeometry, size: ClipSize, shift: float) -> Predict:
    """Return a prediction whose sound moves along its own noise levels in Euler steps. predict: the velocity of each
    part by its own levels. shift: from the pictures' levels to the sound's."""

    def of_parts(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return with_scaled_sound(predict(latents, step), geometry, size, _pace_of_sound(step, shift))

    return of_parts


def estimate_along_schedule_of_sound(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    step: StepInfo,
    geometry: LatentGeometry,
    size: ClipSize,
    shift: float,
) -> torch.Tensor:
    """Return the clean latents, float32 or wider, that a velocity of `with_schedule_of_sound` leads to: x - tau * v of
    the sound, v being its velocity by its own levels. shift: as above."""
    assert step.sigma is not None
    factor = shifted(step.sigma, shift) / (step.sigma * _pace_of_sound(step, shift))
    return latents - step.sigma * with_scaled_sound(velocity.to(latents.dtype), geometry, size, factor)


def _pace_of_sound(step: StepInfo, shift: float) -> float:
    """Return the width of a step between the sound's levels over that between the pictures'."""
    assert step.sigma is not None
    after = (step.next_timestep or 0.0) / _TRAINED_TIMESTEPS
    return (shifted(step.sigma, shift) - shifted(after, shift)) / (step.sigma - after)


def with_carried_sound(predict: Predict, geometry: LatentGeometry, size: ClipSize, shift: float) -> Predict:
    """Return a prediction of latents whose sound is carried along the pictures' noise levels, for any sampler. predict,
    shift: as above."""

    def of_carried(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.sigma is not None
        level, of_sound = step.sigma, shifted(step.sigma, shift)
        carried = geometry.parts(latents, size)
        assert carried.audio is not None
        own = carried.audio * (of_sound / level)
        velocity = geometry.parts(predict(geometry.join(carried.video, own), step), size)
        assert velocity.audio is not None
        data = own - of_sound * velocity.audio
        return geometry.join(velocity.video, (carried.audio - data / shift) / level)

    return of_carried


def carries_sound(request: GenerationRequest) -> bool:
    """Return whether a request's latents hold the sound as it is carried: of samplers but Euler's, and of a clip that
    starts from another one, so that a mixture of noise and data is at one level."""
    return request.sampler not in (None, _EULER) or reads_initial(request)


def with_scaled_sound(latents: torch.Tensor, geometry: LatentGeometry, size: ClipSize, factor: float) -> torch.Tensor:
    """Return latents, or a velocity, with their sound times a factor. A clean sound that was carried, times `shift`, is
    as decoders take it."""
    parts = geometry.parts(latents, size)
    assert parts.audio is not None
    return geometry.join(parts.video, parts.audio * factor)
