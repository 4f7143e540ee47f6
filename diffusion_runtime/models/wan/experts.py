"""Two Wan transformers of one size, one for high noise and one for low (Wan 2.2, A14B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.sharding import SequenceSharding

# The components of a folder, in the order of the experts.
COMPONENTS = ("transformer", "transformer_2")


class WanExperts(DiffusionTransformer):
    """Two experts: 0 predicts at timesteps from `boundary` (in [0, 1000]) up, 1 below it. make: their class."""

    text_is_keys = True

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
        """Return the velocity by the expert of context.step.expert."""
        velocity: torch.Tensor = self.experts[context.step.expert](latents, timestep, inputs, context)
        return velocity

    def read_inputs(self, inputs: DenoiserInputs) -> DenoiserInputs:
        return self.expert(0).read_inputs(inputs)

    def with_positions(
        self, cache: FrameCache, shape: Sequence[int], sharding: SequenceSharding, expert: int = 0
    ) -> FrameCache:
        """Return the cache with the expert's positions: the two may differ in the size of a head."""
        return self.expert(expert).with_positions(cache, shape, sharding)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        return self.expert(0).settle(latents, inputs)

    def expert(self, index: int) -> WanTransformer:
        found = self.experts[index]
        assert isinstance(found, WanTransformer)
        return found
