"""Flow-matching Euler sampler (Lipman et al., arXiv:2210.02747) with the flow shift of Esser et al., arXiv:2403.03206.

x[i+1] = x[i] + (sigma[i+1] - sigma[i]) * v(x[i], sigma[i]),   sigma = s * t / (1 + (s - 1) * t) with flow shift s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler
from diffusion_runtime.denoising.schedule_loop import build_scheduler, run_schedule
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class FlowMatchEulerSampler(Sampler):
    """diffusers' FlowMatchEulerDiscreteScheduler in our loop.

    num_steps: predictions; flow_shift: s above; options: further settings of the scheduler class. sigmas: t of every
    step, None for the scheduler's own spacing.

    Raises RequestError for a number of steps that the options do not allow.
    """

    num_steps: int
    flow_shift: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_steps == 1 and self.options.get("shift_terminal"):
            raise RequestError(
                "num_inference_steps: expected 2 or more, got 1: the last step of this model's schedule is at a noise "
                f"level of {self.options['shift_terminal']:g} (shift_terminal), the first one at 1"
            )

    def sample(
        self,
        noise: torch.Tensor,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        # Given at construction: the class shifts its smallest sigma there, and `set_shift` would leave it as it was.
        options = {**self.options, "shift": self.flow_shift}
        scheduler = build_scheduler(FlowMatchEulerDiscreteScheduler, options, self.num_steps, noise.device, self.sigmas)
        return run_schedule(scheduler, self.num_steps, noise, predict, on_step)
