"""CFG-zero* (Fan et al., arXiv:2503.18886): an optimised scale of the unconditional branch, and first steps of no
velocity.

With v_c, v_u the velocities of the two branches, x the latents, and s the scale of guidance:

    a = <v_c, v_u> / (|v_u|^2 + 1e-8), of each sample        (the multiple of v_u that is nearest to v_c)
    v = a v_u + s (v_c - a v_u)
    v = 0 in the first steps                                 (zero-init)

ComfyUI's node CFGZeroStar has a multiply what a branch predicts to be clean, x_b = x - sigma v_b, in place of the
velocity: x_g = a x_u + s (x_c - a x_u), which is the formula above with a v_u + (1 - a) x / sigma for a v_u.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import BranchWrapper, Predict, PredictBranches

_EPSILON = 1e-8


def optimised_scale(cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
    """Return a of each sample, [batch, 1, ...], float32. cond, uncond: velocities, [batch, ...] float32."""
    dims = tuple(range(1, cond.dim()))
    product = (cond * uncond).sum(dims, keepdim=True)
    return product / (uncond.square().sum(dims, keepdim=True) + _EPSILON)


def with_optimised_scale(*, of_clean: bool = False) -> BranchWrapper:
    """Return a wrapper that scales the velocity of the unconditional branch. of_clean: scale what it predicts to be
    clean, as ComfyUI's node."""

    def wrap(velocities: PredictBranches) -> PredictBranches:
        def scaled(latents: torch.Tensor, step: StepInfo, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
            found = velocities(latents, step, wanted)
            if "uncond" not in found:
                return found
            scale = optimised_scale(found["cond"], found["uncond"])
            uncond = scale * found["uncond"]
            if of_clean:
                assert step.sigma is not None
                uncond = uncond + (1 - scale) * (latents.float() / step.sigma)
            return {**found, "uncond": uncond}

        return scaled

    return wrap


def with_zero_init(predict: Predict, num_steps: int) -> Predict:
    """Return a prediction whose velocity is 0 in the first steps, float32, without a forward pass."""
    if num_steps == 0:
        return predict

    def predicted(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        if step.index < num_steps:
            return torch.zeros_like(latents, dtype=torch.float32)
        return predict(latents, step)

    return predicted
