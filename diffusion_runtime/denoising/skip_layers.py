"""Skip-layer guidance: away from a prediction that some blocks of the transformer take no part in (Hyung et al.,
arXiv:2411.18664, for whole blocks, as Stability AI published it with Stable Diffusion 3.5 in 2024).

With v_b the velocity of branch b and `skipped` the conditional one without the blocks, steps from start on and before
stop have one of

    v = v_uncond + cfg * (v_cond - v_uncond), where v_uncond is computed without the blocks   (scale 0, two passes)
    v = v_uncond + cfg * (v_cond - v_uncond) + scale * (v_cond - v_skipped)                    (three passes)

and without the second branch, v_skipped in place of the guided velocity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from diffusion_runtime.core.step_info import PERTURBED, StepInfo
from diffusion_runtime.denoising.interface import Predict


@dataclass(frozen=True)
class SkipLayers:
    """Skip-layer guidance of a batch. layers: indices of the blocks, from 0; scale: 0 leaves them out of the
    unconditional branch; start, stop: shares of the steps."""

    layers: tuple[int, ...]
    scale: float = 0.0
    start: float = 0.0
    stop: float = 1.0

    @property
    def branch(self) -> str:
        """The branch that is predicted without the blocks."""
        return PERTURBED if self.scale > 0 else "uncond"

    def is_active(self, step: StepInfo) -> bool:
        """Return whether a step has it."""
        return self.start <= step.index / step.num_steps < self.stop

    def around(self, predict: Predict) -> Predict:
        """Return a prediction that leaves out the blocks in its branch."""

        def skipping(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            if step.branch == self.branch and self.is_active(step):
                step = dataclasses.replace(step, skipped_blocks=self.layers)
            return predict(latents, step)

        return skipping

    def further(self, step: StepInfo) -> tuple[str, ...]:
        """Return the branches of a step in addition to those of classifier-free guidance."""
        return (PERTURBED,) if self.scale > 0 and self.is_active(step) else ()

    def combined(self, guided: torch.Tensor, velocities: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the velocity of a step. guided: of classifier-free guidance; velocities: by branch."""
        if PERTURBED not in velocities:
            return guided
        skipped = velocities[PERTURBED]
        base = guided if "uncond" in velocities else skipped
        return base + self.scale * (velocities["cond"] - skipped)
