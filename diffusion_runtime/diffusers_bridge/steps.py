"""Denoising step and request that a forward pass belongs to, read from the pipeline's scheduler without a
synchronisation."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.core.step_info import StepInfo

_BRANCHES = ("cond", "uncond")


class StepFollower:
    """Follower of the steps of one pipeline.

    scheduler: of diffusers; None when unknown: steps are then unknown until `set_step` sets one, and the state of
    backends lives for one forward pass.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._timesteps: torch.Tensor | None = None
        self._values: list[float] = []
        self._stated: StepInfo | None = None
        # Per model: its last position in the timesteps, and the number of passes there.
        self._passes: dict[int, tuple[int, int]] = {}
        self._first_seen: int | None = None
        self.state = RequestCache()

    def set_step(self, step: StepInfo | None) -> None:
        """Set the step of the following forward passes; None to read it from the scheduler again."""
        if step is None or self._stated is None or step.index < self._stated.index:
            self.state = RequestCache()
        self._stated = step

    def begins_request(self) -> int | None:
        """Return the number of steps when the next forward pass is the first of a request, else None."""
        timesteps = None if self._scheduler is None else getattr(self._scheduler, "timesteps", None)
        if not isinstance(timesteps, torch.Tensor) or timesteps is self._timesteps:
            return None
        self._timesteps = timesteps
        self._values = [float(value) for value in timesteps.tolist()]
        self._passes = {}
        self._first_seen = None
        self.state = RequestCache()
        return max(1, len(self._values) - self._first_index())

    def next_pass(self, expert: int, timestep: object) -> StepInfo | None:
        """Return the step of a forward pass that begins now; None when unknown.

        expert: index of the model in the pipeline. timestep: the model's argument.
        """
        if self._stated is not None:
            return self._stated
        if self._timesteps is None:
            self.state = RequestCache()
            return None
        position = self._position(timestep)
        if position is None:
            return None
        if self._first_seen is None:
            self._first_seen = position
        # The same step again is the next guidance branch.
        last, passes = self._passes.get(expert, (-1, 0))
        number = passes if last == position else 0
        self._passes[expert] = (position, number + 1)
        first = self._first_index()
        return StepInfo(
            index=max(0, position - first),
            num_steps=max(1, len(self._values) - first),
            timestep=self._values[min(position, len(self._values) - 1)],
            branch=_BRANCHES[number] if number < len(_BRANCHES) else f"pass {number}",
            expert=expert,
        )

    def _first_index(self) -> int:
        """Return the index at which the request began: requests that start from an image skip the first timesteps."""
        if getattr(type(self._scheduler), "begin_index", None) is None:
            return self._first_seen or 0
        first = self._scheduler.begin_index
        return first if isinstance(first, int) else 0

    def _position(self, timestep: object) -> int | None:
        """Return the index of the pass in the scheduler's timesteps."""
        timesteps = self._timesteps
        assert timesteps is not None
        if isinstance(timestep, torch.Tensor) and timestep.numel() and _shares_memory(timestep, timesteps):
            # Pipelines iterate over the timesteps: `t` is a view of them, and its offset is the step.
            return (timestep.storage_offset() - timesteps.storage_offset()) // max(1, timesteps.stride(0))
        if getattr(type(self._scheduler), "step_index", None) is not None:
            index = self._scheduler.step_index
            return index if isinstance(index, int) else self._first_index()
        if isinstance(timestep, torch.Tensor) and timestep.numel():
            value = float(timestep.reshape(-1)[0])
        elif isinstance(timestep, int | float):
            value = float(timestep)
        else:
            return None
        return self._values.index(value) if value in self._values else None


def _shares_memory(timestep: torch.Tensor, timesteps: torch.Tensor) -> bool:
    same = timestep.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr()
    return same and all(
        stride == 0 or size == 1 for size, stride in zip(timestep.shape, timestep.stride(), strict=True)
    )
