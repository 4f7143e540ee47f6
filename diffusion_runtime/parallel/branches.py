"""CFG parallel: the two branches of classifier-free guidance on two groups of processes (Fang et al., arXiv:2411.01738,
section 4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.parallel.collectives import RankGroup, all_gather, inaccurate_alike
from diffusion_runtime.parallel.groups import ProcessMesh


@dataclass(frozen=True)
class BranchExchange:
    """Each process runs one guidance branch and receives the other branch's velocity from its partner, once per step.

    group: this process and its partner, which holds the same part of the sequence; the first runs `cond`. measures:
    whether the passes of a step that compute these branches may find that attention is too inaccurate; the same answer
    on both.
    """

    group: RankGroup
    measures: Callable[[StepInfo, Sequence[str]], bool] = lambda *_: False

    @classmethod
    def of(
        cls, mesh: ProcessMesh, measures: Callable[[StepInfo, Sequence[str]], bool] = lambda *_: False
    ) -> BranchExchange | None:
        """Return the exchange along a mesh's branch axis, or None when every process runs both branches."""
        return None if mesh.branch.size == 1 else cls(mesh.branch, measures)

    def ending_alike(
        self, step: StepInfo, branches: Sequence[str], device: torch.device
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager around the passes of a step that compute these branches: both processes end where one finds
        its attention too inaccurate. Raises BackendInaccurateError."""
        return inaccurate_alike(self.group, device) if self.measures(step, branches) else contextlib.nullcontext()

    @property
    def branch(self) -> Literal["cond", "uncond"]:
        return "cond" if self.group.index == 0 else "uncond"

    def exchange(self, velocity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cond, uncond), the same on both processes; velocity: of this process's branch, in any shape."""
        cond, uncond = all_gather(self.group, velocity)
        return cond, uncond
