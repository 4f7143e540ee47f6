"""The LongCat-Image transformer: FLUX.1's without a pooled text, with other positions and a guidance of its own."""

from __future__ import annotations

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.denoising.guidance import extrapolate
from diffusion_runtime.layers.embeddings import patchify, unpatchify
from diffusion_runtime.layers.prompt_cache import cached_for_request
from diffusion_runtime.layers.rope import diagonal_rotations, followed_by_text, position_rotations
from diffusion_runtime.models.flux1.transformer import Flux1Transformer
from diffusion_runtime.models.longcat_image.text import MAX_TOKENS


class LongCatImageTransformer(Flux1Transformer):
    """The whole denoiser."""

    def _rotations(
        self, grids: tuple[tuple[int, int, int], ...], num_text_tokens: int, context: AttentionContext
    ) -> torch.Tensor:
        """Return [S + L, head_dim / 2], complex. The image is at 1 on the first axis, and its rows and columns begin
        behind the longest text; the text is at 0 on the first axis, along the diagonal of the others."""
        (grid,), axes, device = grids, self.config.axes, self.out.weight.device

        def compute() -> torch.Tensor:
            places = (range(1, 2), *(range(MAX_TOKENS, MAX_TOKENS + size) for size in grid[1:]))
            on_grid = context.sharding.shard(position_rotations(places, axes, device), dim=0)
            on_diagonal = diagonal_rotations(range(num_text_tokens), axes[1:], device)
            at_zero = on_diagonal.new_ones(num_text_tokens, axes[0] // 2)
            return followed_by_text(on_grid, torch.cat([at_zero, on_diagonal], dim=1))

        return cached_for_request("rotations", (grids, num_text_tokens), context, compute)

    def combine_guidance(self, cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the extrapolation, no token of it longer than the conditional branch's."""
        patch = self.geometry.patch
        tokens = patchify(extrapolate(cond, uncond, scale), patch)
        longest = patchify(cond, patch).norm(dim=-1, keepdim=True)
        share = (longest / (tokens.norm(dim=-1, keepdim=True) + 1e-8)).clamp(max=1.0)
        return unpatchify(tokens * share, self.geometry.grid(cond.shape), patch, channels_first=True)
