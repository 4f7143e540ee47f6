"""Classifier-free guidance (CFG; Ho and Salimans 2022, arXiv:2207.12598) as a wrapper: predict -> predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch

from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.errors import RequestError, nearest
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.request import GUIDANCE_MODES
from diffusion_runtime.step_info import StepInfo

# (cond, uncond, scale) -> guided velocity, all float32 and of one shape.
Combine: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def extrapolate(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """uncond + scale * (cond - uncond)."""
    return uncond + scale * (cond - uncond)


def with_guidance(
    predict: Predict,
    scale: float | Callable[[StepInfo], float],
    mode: str = "batched",
    combine: Combine = extrapolate,
    branches: BranchExchange | None = None,
) -> Predict:
    """`combine` of both branches, in float32, from a prediction that reads `step.branch`.

    predict: called with branch `both` and the latents twice, the conditional half first (`batched`); or with `cond`,
        then `uncond` (`two_pass`: half the memory, the same result within rounding).
    scale: a number, or a function of the step; 1 or less runs the conditional branch alone.
    branches: two groups of processes that run one branch each, whatever the mode; all combine them alike.

    Raises RequestError for an unknown mode.
    """
    if mode not in GUIDANCE_MODES:
        raise RequestError(f"guidance_mode: unknown value {mode!r}.{nearest(mode, GUIDANCE_MODES)}")

    def conditional(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return predict(latents, dataclasses.replace(step, branch="cond")).float()

    def guided(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        factor = scale(step) if callable(scale) else scale
        if factor <= 1:
            return conditional(latents, step)
        if branches is not None:
            mine = predict(latents, dataclasses.replace(step, branch=branches.branch))
            cond, uncond = (velocity.float() for velocity in branches.exchange(mine))
        elif mode == "batched":
            both = predict(torch.cat([latents, latents]), dataclasses.replace(step, branch="both")).float()
            cond, uncond = both.chunk(2)
        else:
            cond = conditional(latents, step)
            uncond = predict(latents, dataclasses.replace(step, branch="uncond")).float()
        return combine(cond, uncond, factor)

    return guided
