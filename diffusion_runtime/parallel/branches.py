"""CFG parallel: the two branches of classifier-free guidance on two groups of processes (Fang et al., arXiv:2411.01738,
section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from diffusion_runtime.parallel.collectives import RankGroup, all_gather
from diffusion_runtime.parallel.groups import ProcessMesh


@dataclass(frozen=True)
class BranchExchange:
    """Each process runs one guidance branch and receives the other branch's velocity from its partner, once per step.

    group: this process and its partner, which holds the same part of the sequence; the first runs `cond`.
    """

    group: RankGroup

    @classmethod
    def of(cls, mesh: ProcessMesh) -> BranchExchange | None:
        """Return the exchange along a mesh's branch axis, or None when every process runs both branches."""
        return None if mesh.branch.size == 1 else cls(mesh.branch)

    @property
    def branch(self) -> Literal["cond", "uncond"]:
        return "cond" if self.group.index == 0 else "uncond"

    def exchange(self, velocity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cond, uncond), the same on both processes; velocity: of this process's branch, in any shape."""
        cond, uncond = all_gather(self.group, velocity)
        return cond, uncond
