"""Flow-matching Euler sampler (Lipman et al., arXiv:2210.02747) with the flow shift of Esser et al., arXiv:2403.03206.

x[i+1] = x[i] + (sigma[i+1] - sigma[i]) * v(x[i], sigma[i]),   sigma = s * t / (1 + (s - 1) * t) with flow shift s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.denoising.diffusers_import import check_diffusers_import
from diffusion_runtime.denoising.euler_solver import EulerSolver, takes
from diffusion_runtime.denoising.schedule_loop import Scheduler, ScheduleSampler, build_scheduler
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class FlowMatchEulerSampler(ScheduleSampler):
    """Euler steps by our solver, or by diffusers' FlowMatchEulerDiscreteScheduler where the solver does not take the
    settings.

    Raises RequestError for a number of steps that the options do not allow.
    """

    def __post_init__(self) -> None:
        if self.num_steps == 1 and self.options.get("shift_terminal"):
            raise RequestError(
                "num_inference_steps: expected 2 or more, got 1: the last step of this model's schedule is at a noise "
                f"level of {self.options['shift_terminal']:g} (shift_terminal), the first one at 1"
            )

    def scheduler(self, device: torch.device) -> Scheduler:
        # Given at construction: the class shifts its smallest sigma there, and `set_shift` would leave it as it was.
        options = {**self.options, "shift": self.flow_shift}
        if takes(options, self.num_steps):
            return EulerSolver(options, self.num_steps, device, self.sigmas)
        check_diffusers_import()
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        scheduler: Scheduler = build_scheduler(
            FlowMatchEulerDiscreteScheduler, options, self.num_steps, device, self.sigmas
        )
        return scheduler
