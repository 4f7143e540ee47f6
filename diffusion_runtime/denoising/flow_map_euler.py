"""Euler steps of flow maps (AnyFlow, arXiv:2605.13724): x_r = x_t - (sigma_t - sigma_r) * v(x_t, t, r) at any number of
noise levels, evenly spaced before the flow shift."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.denoising.diffusers_import import check_diffusers_import
from diffusion_runtime.denoising.euler_solver import EulerSolver, takes
from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.denoising.schedule_loop import Scheduler, ScheduleSampler, build_scheduler

# Of training alone: how losses at different noise levels are weighed.
_UNREAD = ("weight_type",)
_KNOWN = {"num_train_timesteps", "shift"}


@dataclass(frozen=True)
class FlowMapEulerSampler(ScheduleSampler):
    """The steps of diffusers' FlowMapEulerDiscreteScheduler, by our solver, or by that class for settings that the
    solver does not take. The model is told where each step leads: StepInfo.next_timestep."""

    def scheduler(self, device: torch.device) -> Scheduler:
        options = {key: value for key, value in self.options.items() if key not in _UNREAD}
        options["shift"] = self.flow_shift
        if options.keys() <= _KNOWN and takes(options, self.num_steps):
            levels = LinearSigmas().sigmas(self.num_steps) if self.sigmas is None else self.sigmas
            return EulerSolver(options, self.num_steps, device, levels)
        check_diffusers_import()
        from diffusers.schedulers.scheduling_flow_map_euler_discrete import FlowMapEulerDiscreteScheduler

        scheduler: Scheduler = build_scheduler(
            FlowMapEulerDiscreteScheduler, options, self.num_steps, device, self.sigmas
        )
        return scheduler
