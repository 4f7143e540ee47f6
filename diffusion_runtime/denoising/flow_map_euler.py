"""Euler steps of flow maps (AnyFlow, arXiv:2605.13724): x_r = x_t - (sigma_t - sigma_r) * v(x_t, t, r) at any number of
noise levels, evenly spaced before the flow shift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from diffusion_runtime.denoising.flow_match_euler import EulerSolver
from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.denoising.schedule_loop import Scheduler, ScheduleSampler
from diffusion_runtime.untrusted.known_settings import Allows, anything, whole


@dataclass(frozen=True)
class FlowMapEulerSampler(ScheduleSampler):
    """The steps of diffusers' FlowMapEulerDiscreteScheduler. The model is told where each step leads:
    StepInfo.next_timestep."""

    settings: ClassVar[Mapping[str, Allows]] = {
        "num_train_timesteps": whole(2, 100_000),
        # Of training alone: how losses at different noise levels are weighed.
        "weight_type": anything,
    }

    def scheduler(self, device: torch.device) -> Scheduler:
        levels = LinearSigmas().sigmas(self.num_steps) if self.sigmas is None else self.sigmas
        return EulerSolver({**self.options, "shift": self.flow_shift}, self.num_steps, device, levels)
