"""EasyCache (Zhou et al., arXiv:2507.02860): a step's velocity estimated from that of the last computed step.

The change of the latents since the step before, times the rate at which the velocity followed the latents between the
last two computed steps, estimates how much the velocity changed. While the sum of the estimates stays below a
threshold, a step reuses what the model last added to its input:

    after a computed step t, with p the one before it:  k = mean|v_t - v_p| / mean|x_t - x_p|,  c = v_t - x_t,  E = 0
    at a step in between:                               E += k * mean|x_t - x_(t-1)| / mean|v_p|
    E < threshold:                                      v_t = x_t + c, of every guidance branch

Distances are those of the conditional branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import BranchWrapper, PredictBranches
from diffusion_runtime.request.step_cache_options import EasyCacheOptions

# Distances are means over every 7th element: enough of them, and no row of latents is a multiple of 7 long that would
# put the same column into all samples.
SAMPLING_STRIDE = 7

# (step, branches, accumulated error): called for each reused step.
OnReused = Callable[[StepInfo, Sequence[str], float], None]


class ReuseDecision:
    """The decisions of EasyCache for one request: which steps may be reused, from latents and velocities in any shape.

    Every process that sees the same latents and velocities decides alike. One number per step is read from the device.
    """

    def __init__(self, options: EasyCacheOptions) -> None:
        self._threshold = options.threshold
        self._warmup = options.warmup
        self.drop()

    def drop(self) -> None:
        """Forget every step, as when another expert takes over: two computed steps follow."""
        self._latents_before: torch.Tensor | None = None
        self._computed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rate: torch.Tensor | None = None
        self._error: torch.Tensor | float = 0.0
        self._now: torch.Tensor | None = None

    def reuse(self, latents: torch.Tensor, step: StepInfo) -> float | None:
        """Return the accumulated error if this step may be reused, or None if it is to be computed: call `add_computed`
        then."""
        self._now = _sample(latents)
        before, self._latents_before = self._latents_before, self._now
        if step.index < math.ceil(self._warmup * step.num_steps) or step.index == step.num_steps - 1:
            return None
        if before is None or self._rate is None:
            return None
        self._error = self._error + self._rate * (self._now - before).abs().mean()
        # NaN and infinity, of latents that did not change between two computed steps, are not below any threshold.
        error = float(self._error)
        return error if error < self._threshold else None

    def add_computed(self, velocity: torch.Tensor) -> None:
        """Add the velocity computed at the step that `reuse` was last asked about."""
        now, velocity = self._now, _sample(velocity)
        assert now is not None
        if self._computed is not None:
            latents_before, velocity_before = self._computed
            follows = (velocity - velocity_before).abs().mean() / (now - latents_before).abs().mean()
            # k over mean|v_p|: what an error is a multiple of until the next computed step.
            self._rate = follows / velocity.abs().mean()
        self._computed = (now, velocity)
        self._error = 0.0


def _sample(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[::SAMPLING_STRIDE].float()


def easycache(options: EasyCacheOptions, on_reused: OnReused) -> BranchWrapper:
    """EasyCache around the velocities of one request: of one sample, on every process alike."""

    def wrap(velocities: PredictBranches) -> PredictBranches:
        decision = ReuseDecision(options)
        changes: dict[str, torch.Tensor] = {}
        expert: int | None = None

        def cached(latents: torch.Tensor, step: StepInfo, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
            nonlocal expert
            if step.expert != expert:
                expert = step.expert
                decision.drop()
                changes.clear()
            error = decision.reuse(latents, step)
            if error is not None and changes.keys() >= set(wanted):
                on_reused(step, wanted, error)
                return {branch: latents + changes[branch] for branch in wanted}
            computed = velocities(latents, step, wanted)
            decision.add_computed(computed["cond"])
            changes.clear()
            changes.update({branch: velocity - latents for branch, velocity in computed.items()})
            return computed

        return cached

    return wrap
