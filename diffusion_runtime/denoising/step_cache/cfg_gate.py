"""CFG gating: late steps reuse the last difference of the two guidance branches and run the conditional one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import BranchWrapper, PredictBranches

# (step, branches): called for each step whose second branch was not computed.
OnGated = Callable[[StepInfo, Sequence[str]], None]


def cfg_gate(fraction: float, on_gated: OnGated) -> BranchWrapper:
    """uncond = cond - (cond - uncond of the last step that computed both), once `fraction` of the steps are over.

    The difference is dropped when another expert takes over: its first step computes both branches.
    """

    def wrap(velocities: PredictBranches) -> PredictBranches:
        difference: torch.Tensor | None = None
        expert: int | None = None

        def gated(latents: torch.Tensor, step: StepInfo, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
            nonlocal difference, expert
            if step.expert != expert:
                expert, difference = step.expert, None
            if "uncond" not in wanted:
                return velocities(latents, step, wanted)
            if difference is not None and step.index >= fraction * step.num_steps:
                found = velocities(latents, step, [branch for branch in wanted if branch != "uncond"])
                on_gated(step, ("uncond",))
                return {**found, "uncond": found["cond"] - difference}
            both = velocities(latents, step, wanted)
            difference = both["cond"] - both["uncond"]
            return both

        return gated

    return wrap
