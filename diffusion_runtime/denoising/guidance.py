"""Classifier-free guidance (Ho and Salimans 2022, arXiv:2207.12598) as a wrapper: predict -> predict."""

from __future__ import annotations

import dataclasses

import torch

from diffusion_runtime.attention.info import StepInfo
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.errors import RequestError, nearest

MODES = ("batched", "two_pass")


def with_guidance(predict: Predict, scale: float, mode: str = "batched") -> Predict:
    """`uncond + scale * (cond - uncond)`, in float32, out of a prediction that reads `step.branch`.

    predict: called with branch `both` and the latents twice, the conditional half first (`batched`); or with `cond`,
        then `uncond` (`two_pass`: half the memory, the same result within rounding).
    scale: 1 or less runs the conditional branch alone.

    Raises RequestError for an unknown mode.
    """
    if mode not in MODES:
        raise RequestError(f"guidance_mode: unknown value {mode!r}.{nearest(mode, MODES)}")

    def conditional(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return predict(latents, dataclasses.replace(step, branch="cond")).float()

    def two_pass(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        cond = conditional(latents, step)
        uncond = predict(latents, dataclasses.replace(step, branch="uncond")).float()
        return uncond + scale * (cond - uncond)

    def batched(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        both = predict(torch.cat([latents, latents]), dataclasses.replace(step, branch="both")).float()
        cond, uncond = both.chunk(2)
        return uncond + scale * (cond - uncond)

    if scale <= 1:
        return conditional
    return batched if mode == "batched" else two_pass
