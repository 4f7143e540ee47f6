"""The steps of a generation around the one that is timed."""

from __future__ import annotations

import torch

from diffusion_runtime.core.step_info import StepInfo

# Of a flow map, where the timed step leads.
NEXT_TIMESTEP = 650.0


def steps_around(timestep: torch.Tensor, num_steps: int) -> tuple[StepInfo, ...]:
    """Return as many steps, the middle one at the timestep of a forward pass [batch] and the others half a timestep
    apart: what a generation computes for all of its steps before the first is then no part of the timed one."""
    at, middle = float(timestep.flatten()[0]), num_steps // 2
    return tuple(
        StepInfo(index, num_steps, timestep=at + (middle - index) / 2, next_timestep=NEXT_TIMESTEP)
        for index in range(num_steps)
    )
