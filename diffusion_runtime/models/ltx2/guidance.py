"""Guidance of LTX-2: by one scale, or with terms of each part's own (denoising/guidance_terms.py), of latents with the
images that count in part mixed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.guidance import RequestGuidance
from diffusion_runtime.denoising.guidance_terms import GuidanceTerms, with_guidance_terms
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.models.ltx2.conditioned_latents import ConditionedLatents


def of_mixed_latents(guided: Predict, conditions: ConditionedLatents) -> Predict:
    """Return the velocity from latents to the data that a guided prediction finds in them with the images that count in
    part mixed in: v(mixed) + (latents - mixed) / sigma."""

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.sigma is not None
        mixed = conditions.mixed(latents)
        velocity = conditions.at_own_levels(guided(mixed, step))
        return velocity if mixed is latents else velocity + (latents - mixed) / step.sigma

    return predict if conditions.inputs.request.frame_conditions else guided


@dataclass(frozen=True)
class TermsOfParts:
    """Guidance that pictures and sound have each with its own scales. Pictures include the keyframes behind the
    clip."""

    conditions: ConditionedLatents
    terms: GuidanceTerms

    def around(self, predict: Predict, guidance: RequestGuidance) -> Predict:
        """Return the guided velocity of latents without the images that count in full, for a prediction that takes
        them with those."""
        how = guidance.mode, guidance.branches, guidance.wrappers, guidance.is_active
        guided = with_guidance_terms(predict, self.terms, self.split, self.join, *how)

        def of_clip(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            measured = self.measured(latents)
            velocity, num_kept = guided(measured, step), measured.shape[1] - latents.shape[1]
            length = self.conditions.length
            return torch.cat([velocity[:, :length], velocity[:, length + num_kept :]], dim=1) if num_kept else velocity

        return of_clip

    def measured(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents as the terms measure them: rescaling is measured with the images as they are, including
        those given with the clip."""
        conditions = self.conditions
        return conditions.complete(latents) if self.terms.video.rescale > 0 else conditions.settled(latents)

    def split(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pictures, flat where there are frames behind the clip, and the sound."""
        length = self.conditions.length
        parts = self.conditions.geometry.parts(latents[:, :length], self.conditions.inputs.size)
        assert parts.audio is not None
        frames = latents[:, length:]
        video = torch.cat([parts.video.flatten(1), frames], 1) if frames.shape[1] > 0 else parts.video
        return video, parts.audio

    def join(self, video: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        """Return the latents that `split` takes apart, flat."""
        video, end = video.flatten(1), self.conditions.length - audio[0].numel()
        return torch.cat([self.conditions.geometry.join(video[:, :end], audio), video[:, end:]], dim=1)
