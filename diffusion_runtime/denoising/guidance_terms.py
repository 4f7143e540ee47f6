"""Multimodal guidance of models that make pictures and sound (LTX-2.3): classifier-free, spatio-temporal and modality
guidance as differences of clean predictions, with scales of each part's own, and rescaling.

With x the latents, v_b the velocity of branch b and x_b = x - sigma * v_b what it predicts to be clean, of each part:

    x_g = x_cond + (cfg - 1) * (x_cond - x_uncond) + stg * (x_cond - x_perturbed)
                 + (modality - 1) * (x_cond - x_isolated)
    x_r = rescale * x_g * std(x_cond) / std(x_g) + (1 - rescale) * x_g
    v   = (x - x_r) / sigma

`perturbed`: self-attention of some blocks gives each token its own value (spatio-temporal guidance, arXiv:2411.18664).
`isolated`: pictures and sound do not attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from diffusion_runtime.core.step_info import ISOLATED, PERTURBED, StepInfo
from diffusion_runtime.denoising.guidance import deviation, predict_branches
from diffusion_runtime.denoising.interface import BranchWrapper, Predict
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.request.generation_request import GenerationRequest

# (latents) -> those of the pictures and those of the sound, [batch, ...] each; and back.
Split = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PartScales:
    """Guidance of one part. cfg, modality: 1 is none; stg, rescale: 0 is none."""

    cfg: float
    stg: float
    modality: float
    rescale: float


@dataclass(frozen=True)
class GuidanceTerms:
    """Guidance of a request for a model that guides pictures and sound separately. stg_blocks: blocks whose
    self-attention the perturbed pass skips."""

    video: PartScales
    audio: PartScales
    stg_blocks: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        """Return the terms of a resolved request. Values not given for the sound are those of the pictures."""
        assert request.guidance_scale is not None
        video = PartScales(
            cfg=request.guidance_scale,
            stg=request.stg_scale or 0.0,
            modality=1.0 if request.modality_scale is None else request.modality_scale,
            rescale=request.guidance_rescale or 0.0,
        )

        def or_else(value: float | None, other: float) -> float:
            return other if value is None else value

        audio = PartScales(
            cfg=or_else(request.audio_guidance_scale, video.cfg),
            stg=or_else(request.audio_stg_scale, video.stg),
            modality=or_else(request.audio_modality_scale, video.modality),
            rescale=or_else(request.audio_guidance_rescale, video.rescale),
        )
        return cls(video, audio, request.stg_blocks or ())

    @property
    def is_guided(self) -> bool:
        """True if the branch of the negative prompt runs."""
        return max(self.video.cfg, self.audio.cfg) > 1

    @property
    def is_perturbed(self) -> bool:
        return max(self.video.stg, self.audio.stg) > 0

    @property
    def is_isolated(self) -> bool:
        return max(self.video.modality, self.audio.modality) > 1

    @property
    def further_branches(self) -> tuple[str, ...]:
        """Forward passes of each step in addition to the one or two of classifier-free guidance."""
        return (*((PERTURBED,) if self.is_perturbed else ()), *((ISOLATED,) if self.is_isolated else ()))

    @property
    def is_plain(self) -> bool:
        """True if this is classifier-free guidance by one scale."""
        is_rescaled = max(self.video.rescale, self.audio.rescale) > 0
        return self.video.cfg == self.audio.cfg and not self.further_branches and not is_rescaled

    def note(self, mode: str) -> str:
        """Return the forward passes of each step and their purpose, for the report. mode: of `predict_branches`."""
        passes = ["cond"]
        if self.is_guided:
            batched = mode == "batched"
            passes = ["cond and uncond in one batch"] if batched else ["cond", "uncond"]
            passes[-1] += f" (guidance_scale {self.video.cfg:g}, sound {self.audio.cfg:g})"
        if self.is_perturbed:
            blocks = ", ".join(map(str, self.stg_blocks))
            scales = f"stg_scale {self.video.stg:g}, sound {self.audio.stg:g}"
            passes.append(f"self-attention of block {blocks} skipped ({scales})")
        if self.is_isolated:
            scales = f"modality_scale {self.video.modality:g}, sound {self.audio.modality:g}"
            passes.append(f"pictures and sound apart ({scales})")
        count = "one forward pass" if len(passes) == 1 else f"{len(passes)} forward passes"
        rescale = ""
        if max(self.video.rescale, self.audio.rescale) > 0:
            rescale = f"; guidance_rescale {self.video.rescale:g}, sound {self.audio.rescale:g}"
        return f"guidance: {count} per step: {'; '.join(passes)}{rescale}"


def with_guidance_terms(
    predict: Predict,
    terms: GuidanceTerms,
    split: Split,
    join: Join,
    mode: str = "batched",
    branches: BranchExchange | None = None,
    wrappers: Sequence[BranchWrapper] = (),
    is_active: Callable[[StepInfo], bool] = lambda _: True,
) -> Predict:
    """Return the guided velocity of both parts, float32. is_active: whether a step has the branch of the negative
    prompt. The other arguments are those of `with_guidance`; two groups of processes run the further branches one each,
    too."""
    velocities = predict_branches(predict, mode, branches)
    for wrap in wrappers:
        velocities = wrap(velocities)

    def guided(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.sigma is not None
        is_guided = terms.is_guided and is_active(step)
        wanted = ("cond", *(("uncond",) if is_guided else ()), *terms.further_branches)
        sigma, latents = step.sigma, latents.float()
        clean = {branch: split(latents - sigma * each) for branch, each in velocities(latents, step, wanted).items()}
        parts = [
            (part - _combined({branch: both[index] for branch, both in clean.items()}, scales)) / sigma
            for index, (part, scales) in enumerate(zip(split(latents), (terms.video, terms.audio), strict=True))
        ]
        return join(*parts)

    return guided


def _combined(clean: Mapping[str, torch.Tensor], scales: PartScales) -> torch.Tensor:
    """x_r above. clean: x_b by branch."""
    cond = clean["cond"]
    factors = {"uncond": scales.cfg - 1, PERTURBED: scales.stg, ISOLATED: scales.modality - 1}
    result = cond
    for branch, factor in factors.items():
        if branch in clean:
            result = result + factor * (cond - clean[branch])
    if scales.rescale == 0:
        return result
    return scales.rescale * (result * (deviation(cond) / deviation(result))) + (1 - scales.rescale) * result
