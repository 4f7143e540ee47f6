"""UniPC sampler, a multistep predictor-corrector (Zhao et al. 2023, arXiv:2302.04867), for flow matching."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.denoising.diffusers_import import check_diffusers_import
from diffusion_runtime.denoising.schedule_loop import Scheduler, ScheduleSampler, build_scheduler
from diffusion_runtime.denoising.unipc_solver import UniPCSolver, takes


@dataclass(frozen=True)
class UniPCSampler(ScheduleSampler):
    """UniPC by our solver, or by diffusers' UniPCMultistepScheduler where the solver does not take the settings.

    `sigmas` are not read: the solver spaces its own.
    """

    def scheduler(self, device: torch.device) -> Scheduler:
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": self.flow_shift}
        options = {**self.options, **flow}
        if takes(options, self.num_steps):
            return UniPCSolver(options, self.num_steps, device)
        check_diffusers_import()
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        scheduler: Scheduler = build_scheduler(UniPCMultistepScheduler, options, self.num_steps, device)
        return scheduler
