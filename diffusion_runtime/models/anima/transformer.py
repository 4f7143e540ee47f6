"""The Anima transformer, Cosmos-Predict2 (arXiv:2511.00062) for single images, on our attention layers, for inference.

    states of a language model, T5's token ids -> text conditioner -> text
    latents -> patches -> num_layers x block -> modulated norm -> velocity

A block is self-attention over the grid, cross-attention to the text, and a feed-forward network, each after a norm that
the timestep shifts and scales, and gated by it; two narrow layers of each block make these rows, and add them to rows
that all blocks share. Shapes in this file: B batch, S grid tokens, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, RunBlock, Streams
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_
from diffusion_runtime.layers.embeddings import patchify, timestep_waves, unpatchify
from diffusion_runtime.layers.linear import FeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import BlockModulation, ModulatedBlock, modulated_layer_norm, norm_for
from diffusion_runtime.layers.modulation_rows import ModulationRows, modulations_of, rows_of_step
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import norm_and_rotate, position_rotations, split_head_dim
from diffusion_runtime.layers.rotated_attention import rotated_attention
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.anima.conditioner import TextConditioner
from diffusion_runtime.models.anima.config import PATCH, AnimaTransformerConfig
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.text_encoders.interface import Conditions

# The model takes the noise level in [0, 1].
_TIME_SCALE = 1000.0
# [B, L, heads, head_dim] each.
KeysAndValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class AnimaModulation(BlockModulation):
    """Rows from an embedding of the timestep through two layers, the first of which is narrow, added to rows that all
    blocks share. The conditioning is both, one after the other: [batch, D + 3 D]."""

    read_once = ("narrow", "projection")

    def __init__(self, config: AnimaTransformerConfig, num_rows: int) -> None:
        super().__init__(config.dim, num_rows, bias=False, in_dim=config.narrow_dim)
        self.narrow = Linear(config.dim, config.narrow_dim, bias=False)

    def stacked(self, conditioning: torch.Tensor) -> torch.Tensor:
        """Return the rows, [num_rows, batch, D]."""
        embedded, shared = conditioning[:, : self.dim], conditioning[:, self.dim :]
        rows = self.projection(self.narrow(embedded)) + shared[:, : self.num_rows * self.dim]
        return torch.unflatten(rows, -1, (self.num_rows, -1)).transpose(0, 1)


class AnimaSelfAttention(nn.Module):
    """Attention among the grid's tokens, with rotary positions."""

    def __init__(self, config: AnimaTransformerConfig, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.qkv = Linear(config.dim, 3 * config.dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.out = Linear(config.dim, config.dim, bias=False)
        layer = LayerInfo(index, config.num_layers, "self", f"blocks.{index}.self_attention.attention")
        self.attention = USPAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)

    def forward(self, x: LinearInput, rotations: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Attend. x: [B, S, D]; rotations: [S, head_dim / 2], complex."""
        product = self.qkv(x).unflatten(-1, (3, self.attention.num_heads, -1))
        attended = rotated_attention(self.attention, product, (self.norm_q, self.norm_k), rotations, context)
        out: torch.Tensor = self.out(attended.flatten(2))
        return out


class AnimaCrossAttention(nn.Module):
    """Attention to the text, which has no positions."""

    # Read by `keys_and_values`, not by forward.
    read_once = ("kv", "norm_k")

    def __init__(self, config: AnimaTransformerConfig, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.q = Linear(config.dim, config.dim, bias=False)
        self.kv = Linear(config.text_dim, 2 * config.dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.out = Linear(config.dim, config.dim, bias=False)
        layer = LayerInfo(index, config.num_layers, "cross", f"blocks.{index}.cross_attention.attention")
        self.attention = LocalAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)

    def keys_and_values(self, text: torch.Tensor) -> KeysAndValues:
        """Return the keys and values of a text [B, L, text_dim]."""
        product = self.kv(text).unflatten(-1, (2, self.attention.num_heads, -1))
        k, v = norm_and_rotate(product, (self.norm_k,), None, num_shares=self.attention.num_shares)
        return k, v

    def forward(self, x: LinearInput, keys: KeysAndValues, context: AttentionContext) -> torch.Tensor:
        """Attend. x: [B, S, D]; context.layout: the text."""
        packed = self.q(x).unflatten(-1, (1, self.attention.num_heads, -1))
        (q,) = norm_and_rotate(packed, (self.norm_q,), None, num_shares=self.attention.num_shares)
        out: torch.Tensor = self.out(self.attention(q, *keys, context).flatten(2))
        return out


class AnimaBlock(ModulatedBlock):
    """Block. Its rows are shift, scale and gate of each of its three parts, [3, B, D]."""

    def __init__(self, config: AnimaTransformerConfig, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.norm = Norm("layer", config.eps)
        self.modulation = AnimaModulation(config, 3)
        self.self_attention = AnimaSelfAttention(config, index, policy)
        self.cross_modulation = AnimaModulation(config, 3)
        self.cross_attention = AnimaCrossAttention(config, index, policy)
        self.ffn_modulation = AnimaModulation(config, 3)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim, bias=False, is_exact=True)

    @property
    def modulations(self) -> tuple[BlockModulation, ...]:
        """Modulations of self-attention, cross-attention and feed-forward."""
        return self.modulation, self.cross_modulation, self.ffn_modulation

    def forward(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        cross_rows: torch.Tensor,
        ffn_rows: torch.Tensor,
        keys: KeysAndValues,
        rotations: torch.Tensor,
        grid_context: AttentionContext,
        text_context: AttentionContext,
    ) -> torch.Tensor:
        """Run the block and return x [B, S, D], which is overwritten. keys: of the text, for this block."""
        shift, scale, gate = rows.unbind()
        normed = norm_for((self.self_attention.qkv,), x, self.norm, shift=shift, scale=scale)
        branch = Branch(self.self_attention(normed, rotations, grid_context), gate)
        shift, scale, gate = cross_rows.unbind()
        normed = norm_for((self.cross_attention.q,), x, self.norm, shift=shift, scale=scale, branch=branch)
        branch = Branch(self.cross_attention(normed, keys, text_context), gate)
        shift, scale, gate = ffn_rows.unbind()
        normed = norm_for((self.feed_forward.up,), x, self.norm, shift=shift, scale=scale, branch=branch)
        return add_branch_(x, Branch(self.feed_forward(normed), gate))


class AnimaTransformer(DiffusionTransformer):
    """The whole denoiser, with the text conditioner."""

    text_is_keys = True

    def __init__(self, config: AnimaTransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.conditioner = TextConditioner(config.conditioner, policy)
        channels = config.patch_channels // config.num_channels * (config.num_channels + config.has_mask)
        self.patch_embedding = Linear(channels, config.dim, bias=False)
        self.timestep_up = Linear(config.dim, config.dim, bias=False)
        self.timestep_down = Linear(config.dim, 3 * config.dim, bias=False)
        self.timestep_norm = RMSNorm(config.dim, config.eps)
        self.blocks = nn.ModuleList(AnimaBlock(config, index, policy) for index in range(config.num_layers))
        self.out_modulation = AnimaModulation(config, 2)
        self.out = Linear(config.dim, config.patch_channels, bias=False)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. A sample does not depend on the others of its batch. The zeros behind a short text are
        attended to, as in training."""
        grid = self.geometry.grid(latents.shape)
        context = self.in_token_order(context, grid, latents.device)
        sharding, num_tokens, eps = context.sharding, math.prod(grid), self.config.eps
        # Nothing of a picture is padding: the mask is zero.
        masked = F.pad(latents.to(self.out.weight.dtype), (0, 0) * 3 + (0, self.config.has_mask))
        x = sharding.shard(self.patch_embedding(patchify(masked, PATCH)))
        keys = cached_for_prompt("text", inputs.text.embeddings, context, lambda: self._keys(inputs.text, context))
        rotations = cached_for_request("rotations", grid, context, lambda: self._rotations(grid, context))
        rows = rows_of_step(
            "anima", None, modulations_of(self.blocks, self.out_modulation), timestep, self._condition, context
        )
        grid_context = context.with_layout(TokenLayout(grid, tile=sharding.tile))
        text_context = context.with_layout(self.conditioner.layout_of(inputs.text))
        first, entering = self.blocks[0], x
        assert isinstance(first, AnimaBlock)

        def run_of(block: nn.Module, own: KeysAndValues) -> RunBlock:
            assert isinstance(block, AnimaBlock)

            def run(streams: Streams) -> Streams:
                made = [rows.of(modulation) for modulation in block.modulations]
                return (block(*streams, *made, own, rotations, grid_context, text_context),)

            return run

        def modulated_input() -> ModulatedInput:
            shift, scale, _ = rows.of(first.modulation).unbind()
            return ModulatedInput(modulated_layer_norm(entering, shift, scale, eps))

        blocks = [run_of(block, own) for block, own in zip(self.blocks, keys, strict=True)]
        (x,) = context.run_blocks(blocks, (x,), num_tokens, modulated_input)
        tokens = sharding.gather(self.out(self._last_norm(x, rows)), num_tokens)
        return unpatchify(tokens, grid, PATCH).to(latents.dtype)

    def _last_norm(self, x: torch.Tensor, rows: ModulationRows) -> torch.Tensor:
        shift, scale = rows.of(self.out_modulation).unbind()
        return modulated_layer_norm(x, shift, scale, self.config.eps)

    def _keys(self, text: Conditions, context: AttentionContext) -> tuple[KeysAndValues, ...]:
        """Return every block's keys and values of a text."""
        tokens, made = self.conditioner(text, context), []
        for block in self.blocks:
            assert isinstance(block, AnimaBlock)
            with held_weights(block.cross_attention):
                made.append(block.cross_attention.keys_and_values(tokens))
        return tuple(made)

    def _condition(self, timestep: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        """Return what AnimaModulation takes of timesteps [B]."""
        waves = timestep_waves(timestep / _TIME_SCALE, self.config.dim).to(self.out.weight.dtype)
        shared = self.timestep_down(F.silu(self.timestep_up(waves)))
        # Last: the norm of float32 numbers is in place.
        return torch.cat([F.silu(self.timestep_norm(waves)), shared], dim=-1)

    def _rotations(self, grid: tuple[int, int, int], context: AttentionContext) -> torch.Tensor:
        """Return [S, head_dim / 2], complex."""
        axes, channels = tuple(range(size) for size in grid), split_head_dim(self.config.head_dim)
        table = position_rotations(axes, channels, self.out.weight.device, self.config.thetas)
        return context.sharding.shard(table, dim=0)
