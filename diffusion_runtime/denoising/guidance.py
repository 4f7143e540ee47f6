"""Classifier-free guidance (CFG; Ho and Salimans 2022, arXiv:2207.12598) as a wrapper: predict -> predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from diffusion_runtime.core.step_info import ISOLATED, PERTURBED, StepInfo
from diffusion_runtime.denoising.interface import BranchWrapper, Predict, PredictBranches
from diffusion_runtime.denoising.skip_layers import SkipLayers
from diffusion_runtime.errors import RequestError, nearest
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.request.generation_request import GUIDANCE_MODES

# (cond, uncond, scale) -> guided velocity, all float32 and of one shape.
Combine: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True)
class RequestGuidance:
    """Guidance of a batch. scale: the factor of classifier-free guidance at a step, 1 where is_active says that the
    step is without; mode, branches, wrappers, skip: see with_guidance."""

    scale: Callable[[StepInfo], float]
    is_active: Callable[[StepInfo], bool]
    mode: str
    branches: BranchExchange | None = None
    wrappers: Sequence[BranchWrapper] = ()
    skip: SkipLayers | None = None


def extrapolate(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """uncond + scale * (cond - uncond)."""
    return uncond + scale * (cond - uncond)


def rescaled(combine: Combine, rescale: float) -> Combine:
    """`combine` with the share `rescale` of its result brought to the conditional velocity's deviation, of each sample
    (Lin et al., arXiv:2305.08891, section 3.4): large scales otherwise overexpose. 0 changes nothing."""
    if rescale == 0:
        return combine

    def guided(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        result = combine(cond, uncond, scale)
        ratio = deviation(cond) / deviation(result)
        return rescale * (result * ratio) + (1 - rescale) * result

    return guided


def deviation(values: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each sample, in the shape [batch, 1, ...]."""
    return values.std(dim=tuple(range(1, values.dim())), keepdim=True)


def with_guidance(
    predict: Predict,
    scale: float | Callable[[StepInfo], float],
    mode: str = "batched",
    combine: Combine = extrapolate,
    branches: BranchExchange | None = None,
    wrappers: Sequence[BranchWrapper] = (),
    skip: SkipLayers | None = None,
) -> Predict:
    """`combine` of both branches, in float32, from a prediction that reads `step.branch`.

    predict: called with branch `both` and the latents twice, the conditional half first (`batched`); or with `cond`,
        then `uncond` (`two_pass`: half the memory, the same result within rounding).
    scale: a number, or a function of the step; 1 or less runs the conditional branch alone.
    branches: two groups of processes that run one branch each, whatever the mode; all combine them alike.
    wrappers: around the velocities of the branches, before they are combined; the last one is the outermost.
    skip: skip-layer guidance; of the unconditional branch it needs `two_pass`.

    Raises RequestError for an unknown mode.
    """
    velocities = predict_branches(predict if skip is None else skip.around(predict), mode, branches)
    for wrap in wrappers:
        velocities = wrap(velocities)

    def guided(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        factor = scale(step) if callable(scale) else scale
        further = () if skip is None else skip.further(step)
        found = velocities(latents, step, ("cond", *(("uncond",) if factor > 1 else ()), *further))
        made = combine(found["cond"], found["uncond"], factor) if factor > 1 else found["cond"]
        return made if skip is None else skip.combined(made, found)

    return guided


def predict_branches(predict: Predict, mode: str, branches: BranchExchange | None = None) -> PredictBranches:
    """Predict the velocities of the guidance branches, as `with_guidance` describes them; of further ones
    (core/step_info.py) in passes of their own. Raises RequestError."""
    if mode not in GUIDANCE_MODES:
        raise RequestError(f"guidance_mode: unknown value {mode!r}.{nearest(mode, GUIDANCE_MODES)}")

    def of_branch(latents: torch.Tensor, step: StepInfo, branch: str) -> torch.Tensor:
        return predict(latents, dataclasses.replace(step, branch=branch)).float()

    def velocities(latents: torch.Tensor, step: StepInfo, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        if branches is not None and step.shares_keys:
            return _from_first_group(latents, step, wanted, of_branch, branches)
        if branches is not None:
            return _exchanged(latents, step, wanted, of_branch, branches)
        if mode == "batched" and "uncond" in wanted:
            cond, uncond = of_branch(torch.cat([latents, latents]), step, "both").chunk(2)
            further = [branch for branch in wanted if branch not in ("cond", "uncond")]
            return {"cond": cond, "uncond": uncond, **{each: of_branch(latents, step, each) for each in further}}
        return {branch: of_branch(latents, step, branch) for branch in wanted}

    return velocities


# What two groups of processes compute at the same time, the first group's first.
_PAIRS = (("cond", "uncond"), (PERTURBED, ISOLATED))


def _from_first_group(
    latents: torch.Tensor,
    step: StepInfo,
    wanted: Sequence[str],
    of_branch: Callable[[torch.Tensor, StepInfo, str], torch.Tensor],
    branches: BranchExchange,
) -> dict[str, torch.Tensor]:
    """Return the velocities, all computed by the first group of processes: the other one has no keys of the conditional
    branch."""
    is_first = branches.branch == "cond"
    with branches.ending_alike(step, wanted, latents.device):
        own = [of_branch(latents, step, each) if is_first else torch.zeros_like(latents).float() for each in wanted]
    first, _ = branches.exchange(torch.stack(own))
    return dict(zip(wanted, first, strict=True))


def _exchanged(
    latents: torch.Tensor,
    step: StepInfo,
    wanted: Sequence[str],
    of_branch: Callable[[torch.Tensor, StepInfo, str], torch.Tensor],
    branches: BranchExchange,
) -> dict[str, torch.Tensor]:
    """Return the velocities, each computed by one group of processes."""
    found: dict[str, torch.Tensor] = {}
    for pair in _PAIRS:
        if set(pair).isdisjoint(wanted):
            continue
        mine = pair[0] if branches.branch == "cond" else pair[1]
        # Also where one of them is wanted: the other group waits for it.
        with branches.ending_alike(step, [each for each in pair if each in wanted], latents.device):
            velocity = of_branch(latents, step, mine) if mine in wanted else torch.zeros_like(latents).float()
        found.update(zip(pair, branches.exchange(velocity), strict=True))
    return {branch: found[branch] for branch in wanted}
