"""UniPC sampler, a multistep predictor-corrector (Zhao et al. 2023, arXiv:2302.04867), for flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler
from diffusion_runtime.denoising.schedule_loop import build_scheduler, run_schedule


@dataclass(frozen=True)
class UniPCSampler(Sampler):
    """diffusers' UniPCMultistepScheduler in our loop.

    num_steps: predictions; flow_shift: s of sigma = s * t / (1 + (s - 1) * t); options: further settings of the class.
    sigmas: not read, the solver spaces its own.
    """

    num_steps: int
    flow_shift: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] | None = None

    def sample(
        self,
        noise: torch.Tensor,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": self.flow_shift}
        scheduler = build_scheduler(UniPCMultistepScheduler, {**self.options, **flow}, self.num_steps, noise.device)
        return run_schedule(scheduler, self.num_steps, noise, predict, on_step)
