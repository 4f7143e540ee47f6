"""The LTX-Video transformer (arXiv:2501.00103) on our attention layers, for inference.

    latents -> tokens -> num_layers x block -> modulated norm -> projection -> velocity

A block is self-attention over the frames x height x width grid, cross-attention to the text, and a feed-forward
network; the timestep shifts, scales and gates the first and the last. A video that starts from an image has that as its
first latent frame, whose tokens are at timestep 0 all along. Shapes in this file: B batch, S grid tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Norm
from diffusion_runtime.layers.across_heads_attention import (
    AcrossHeadsCrossAttention,
    AcrossHeadsSelfAttention,
    KeysAndValues,
)
from diffusion_runtime.layers.embeddings import TextEmbedding, TimestepModulation, patchify, unpatchify
from diffusion_runtime.layers.linear import FeedForward, Linear
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import extent_paces, grid_extent_rotations
from diffusion_runtime.layers.token_runs import (
    TokenRun,
    add_gated_by_run_,
    embedding_by_run,
    modulated_by_run,
    modulated_for,
    normed_after_branch,
    rows_by_run,
    token_runs,
)
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.ltx_video.config import LTXVideoConfig, LTXVideoGeometry

NUM_WAVES = 256
# The eps of the norms of q and k, and of the last norm, whatever the config sets for the others.
_QK_EPS, _OUT_EPS = 1e-5, 1e-6
# Rotary positions: the quickest pace, and the seconds and pixels of height and width that count as 1.
_THETA, _EXTENTS = 10000.0, (20, 2048, 2048)


class LTXVideoBlock(nn.Module):
    """Block. modulation: six rows of D, the layer's own part of (shift, scale, gate) for attention and feed-forward."""

    def __init__(self, config: LTXVideoConfig, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.norm = Norm("rms", config.eps)
        self.modulation = nn.Parameter(torch.zeros(6, config.dim))
        layer = LayerInfo(index, config.num_layers, "self", f"blocks.{index}.self_attention")
        grid = USPAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)
        self.self_attention = AcrossHeadsSelfAttention(config.dim, _QK_EPS, grid)
        layer = LayerInfo(index, config.num_layers, "cross", f"blocks.{index}.cross_attention")
        text = LocalAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)
        self.cross_attention = AcrossHeadsCrossAttention(config.dim, config.dim, config.dim, _QK_EPS, text)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(
        self,
        x: torch.Tensor,
        runs: tuple[TokenRun, ...],
        rotations: torch.Tensor,
        context: AttentionContext,
        text_context: AttentionContext,
        text: KeysAndValues,
    ) -> None:
        """Run the block; x [B, S, D] is overwritten. context, text_context: the forward pass where the grid and the
        text are the keys. text: for this block."""
        rows = rows_by_run(self.modulation, runs)
        shifts = [(tokens, each[0], each[1]) for tokens, each in rows]
        normalized = modulated_for((self.self_attention.qkv,), x, self.norm, shifts)
        branch = self.self_attention(normalized, rotations, context)
        add_gated_by_run_(x, branch, [(tokens, each[2]) for tokens, each in rows])
        attended = self.cross_attention(x, text, text_context)
        shifts = [(tokens, each[3], each[4]) for tokens, each in rows]
        normalized = normed_after_branch(x, attended, None, self.norm, layers=(self.feed_forward.up,), shifts=shifts)
        add_gated_by_run_(x, self.feed_forward(normalized), [(tokens, each[5]) for tokens, each in rows])

    def modulated_input(self, x: torch.Tensor, runs: tuple[TokenRun, ...]) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        rows = rows_by_run(self.modulation, runs, slice(0, 2))
        return ModulatedInput(modulated_by_run(x, self.norm, [(tokens, each[0], each[1]) for tokens, each in rows]))


class LTXVideoTransformer(DiffusionTransformer):
    """The whole denoiser. In a model of another dtype than float32 the modulation, the modulated norms and the gated
    sums are still computed in float32."""

    geometry: LTXVideoGeometry
    text_is_keys = True

    def __init__(self, config: LTXVideoConfig, geometry: LTXVideoGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.embedding = Linear(config.num_channels, config.dim)
        self.text_embedding = TextEmbedding(config.text_dim, config.dim)
        self.time = TimestepModulation(NUM_WAVES, config.dim, 6)
        self.blocks = nn.ModuleList(LTXVideoBlock(config, index, policy) for index in range(config.num_layers))
        self.out_modulation = nn.Parameter(torch.zeros(2, config.dim))
        self.out = Linear(config.dim, config.num_channels)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        grid = self.geometry.grid(latents.shape)
        if inputs.image is None:
            # The tokens of a first frame, at a timestep of their own, are a range in raster order alone.
            context = self.in_token_order(context, grid, latents.device)
        dtype, sharding, fps = self.out.weight.dtype, context.sharding, inputs.size.fps
        x = sharding.shard(self.embedding(patchify(self.settle(latents, inputs).to(dtype), self.geometry.patch)))
        of_image = None if inputs.image is None else torch.zeros_like(timestep)
        runs = token_runs(timestep, self.time, grid, sharding, first_timestep=of_image)
        rotations = cached_for_request(
            "rotations", (grid, fps), context, lambda: sharding.shard(self._rotations(grid, fps, x.device), dim=0)
        )
        text = self._text(inputs, context)
        text_context = context.with_layout(TokenLayout.text(text[0][0].shape[1], inputs.text.lengths))
        grid_context = context.with_layout(TokenLayout(grid, tile=sharding.tile))
        blocks = (
            overwriting(block, runs, rotations, grid_context, text_context, of_block)
            for block, of_block in zip(self.blocks, text, strict=True)
        )
        first, entering = next(self._all_blocks()), x

        def modulated_input() -> ModulatedInput:
            with held_weights(first):
                return first.modulated_input(entering, runs)

        (x,) = context.run_blocks(blocks, (x,), math.prod(grid), modulated_input)
        rows = embedding_by_run(self.out_modulation, runs)
        tokens = sharding.gather(self.out(modulated_by_run(x, Norm("layer", _OUT_EPS), rows)), math.prod(grid))
        return unpatchify(tokens, grid, self.geometry.patch, channels_first=True).to(latents.dtype)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return latents [B, channels, frames, height, width] whose first frame is the image's, where there is one."""
        if inputs.image is None:
            return latents
        return torch.cat([inputs.image.latents.to(latents.device, latents.dtype), latents[:, :, 1:]], dim=2)

    def _rotations(self, grid: tuple[int, int, int], fps: int, device: torch.device) -> torch.Tensor:
        """Return [S, heads, head_dim / 2], complex: every token where its extent begins, in seconds and pixels."""
        dim, positions = self.config.dim, self.geometry.token_starts(grid, fps)
        paces = extent_paces(_THETA, dim, 3, is_double=False)
        return grid_extent_rotations(positions, _EXTENTS, paces, self.config.num_heads, dim, device)

    def _text(self, inputs: DenoiserInputs, context: AttentionContext) -> tuple[KeysAndValues, ...]:
        """Return every block's keys and values of the text, as long as the longest prompt; kept for the other steps of
        the request."""
        embeddings, num_tokens = inputs.text.embeddings, max(1, *inputs.text.lengths)

        def project() -> tuple[KeysAndValues, ...]:
            text = self.text_embedding(embeddings[:, :num_tokens].to(self.out.weight.dtype))
            keys = []
            for block in self._all_blocks():
                with held_weights(block):
                    keys.append(block.cross_attention.keys_and_values(text))
            return tuple(keys)

        return cached_for_prompt("text_projection", embeddings, context, project)

    def _all_blocks(self) -> Iterator[LTXVideoBlock]:
        return (block for block in self.blocks if isinstance(block, LTXVideoBlock))
