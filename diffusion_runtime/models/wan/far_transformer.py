"""The transformer of AnyFlow-FAR (arXiv:2605.13724, on FAR, arXiv:2503.19325): a causal Wan flow map that embeds older
frames in larger patches.

A token of a large patch stands for several of the others, and turns by the middle of their positions. In a pass in
large patches nothing is predicted but keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.history import HistoryPlan
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.layers.embeddings import PatchEmbedding
from diffusion_runtime.layers.rope import position_rotations, split_head_dim
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.sharding import SequenceSharding


class FarTransformer(WanTransformer):
    """Wan transformer with older frames in large patches. history_embedding: of large patches."""

    def __init__(self, config: WanTransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__(config, geometry, policy)
        assert config.history is not None
        self.history = config.history
        self.history_embedding = PatchEmbedding(config.in_channels, config.dim, config.history.patch)

    def patches(self, latents: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Return the tokens and their grid, in large patches in a pass over older frames."""
        if not _is_compressed(context.cache):
            return super().patches(latents, context)
        grid, patch = self.history.grid(latents.shape), self.history.patch
        # A remainder that does not fill a patch is left out, as a convolution does.
        whole = latents[..., : grid[1] * patch[1], : grid[2] * patch[2]]
        return self.history_embedding(whole), grid

    def with_positions(
        self, cache: FrameCache, shape: Sequence[int], sharding: SequenceSharding, expert: int = 0
    ) -> FrameCache:
        if not _is_compressed(cache):
            return super().with_positions(cache, shape, sharding, expert)
        _, height, width = self.history.grid(shape)
        spans = tuple(large // small for large, small in zip(self.history.patch, self.config.patch, strict=True))
        box = (cache.plan.frames, range(0, height * spans[1], spans[1]), range(0, width * spans[2], spans[2]))
        device = self.out.weight.device
        rotations = position_rotations(box, split_head_dim(self.config.head_dim), device, spans=spans)
        return cache.with_rotations(sharding.shard(rotations, 0))


def _is_compressed(cache: FrameCache | None) -> bool:
    return cache is not None and isinstance(cache.plan, HistoryPlan) and cache.plan.is_compressed
