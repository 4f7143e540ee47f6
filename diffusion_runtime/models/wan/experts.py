"""Two Wan transformers of one size, one for high noise and one for low (Wan 2.2, A14B)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.transformer import WanTransformer

# The components of a folder, in the order of the experts.
COMPONENTS = ("transformer", "transformer_2")


class WanExperts(DiffusionTransformer):
    """Expert 0 predicts at timesteps from `boundary` (in [0, 1000]) up, expert 1 below it. make: the class of both."""

    def __init__(
        self,
        configs: tuple[WanTransformerConfig, WanTransformerConfig],
        geometry: LatentGeometry,
        policy: AttentionPolicy,
        boundary: float,
        make: Callable[..., WanTransformer] = WanTransformer,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.boundary = boundary
        self.experts = nn.ModuleList(
            make(config, geometry, policy, prefix=f"experts.{index}.") for index, config in enumerate(configs)
        )

    @property
    def num_blocks(self) -> int:
        # Of each: the two have one size.
        return min(self.expert(index).num_blocks for index in range(len(self.experts)))

    def expert_at(self, timestep: float) -> int:
        return 0 if timestep >= self.boundary else 1

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """See DiffusionTransformer.forward. context.step.expert says which expert predicts."""
        velocity: torch.Tensor = self.experts[context.step.expert](latents, timestep, inputs, context)
        return velocity

    def read_inputs(self, inputs: DenoiserInputs) -> DenoiserInputs:
        return self.expert(0).read_inputs(inputs)

    def replay_refusal(self) -> str | None:
        return self.expert(0).replay_refusal()

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        return self.expert(0).settle(latents, inputs)

    def expert(self, index: int) -> WanTransformer:
        found = self.experts[index]
        assert isinstance(found, WanTransformer)
        return found
