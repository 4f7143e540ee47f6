"""The Krea 2 transformer on our attention layers, for inference.

    states of N layers -> blocks across layers, per token -> their sum -> blocks across tokens -> text
    latents -> patches, followed by the text -> blocks -> scaled norm -> velocity

Picture and text share all weights and one modulation of the timestep, to which each block adds a table of its own.
Attention has fewer heads of keys and values than of queries (GQA, arXiv:2305.13245), and its output is multiplied by
the logistic function of a gate (arXiv:2505.06708). Shapes in this file: B batch, S grid tokens, L text tokens, N layers
of the language model, D width (num_heads * head_dim).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.activations.api import sigmoid_mul
from diffusion_runtime.kernels.modulated_norm.api import Branch, add_branch_, modulated_norm
from diffusion_runtime.layers.embeddings import patchify, timestep_waves, unpatchify
from diffusion_runtime.layers.linear import FeedForward, GatedFeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import norm_for
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import followed_by_text, norm_and_rotate, position_rotations
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.krea2.config import PATCH, BlockSizes, Krea2TransformerConfig
from diffusion_runtime.text_encoders.interface import Conditions

LAYERS_ROLE, REFINER_ROLE = "krea2.text_layers", "krea2.text_refiner"
# The model takes time in [0, 1] and multiplies it by this.
_TIME_SCALE = 1000.0
_NUM_ROWS = 6


class Krea2Attention(nn.Module):
    """Attention with a gate for each number of its output; no bias anywhere. attention: with `sizes`."""

    def __init__(self, sizes: BlockSizes, eps: float, attention: AttentionLayer) -> None:
        super().__init__()
        self.qkv_gate = Linear(sizes.dim, 2 * sizes.dim + 2 * sizes.kv_dim, bias=False)
        self.norm_q = RMSNorm(sizes.head_dim, eps)
        self.norm_k = RMSNorm(sizes.head_dim, eps)
        self.out = Linear(sizes.dim, sizes.dim, bias=False)
        self.attention = attention

    def forward(self, x: LinearInput, rotations: torch.Tensor | None, context: AttentionContext) -> torch.Tensor:
        """Attend. x: [B, tokens, D]; rotations: [tokens, head_dim / 2], complex, None for tokens without positions."""
        layer = self.attention
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads, layer.num_heads)
        *parts, gate = self.qkv_gate(x).split([layer.head_dim * count for count in heads], dim=-1)
        packed = [part.unflatten(-1, (1, -1, layer.head_dim)) for part in parts]
        (q,) = norm_and_rotate(packed[0], (self.norm_q,), rotations, num_shares=layer.num_shares)
        (k,) = norm_and_rotate(packed[1], (self.norm_k,), rotations, num_shares=layer.num_shares)
        attended = layer(q, k, packed[2].squeeze(2), context)
        out: torch.Tensor = self.out(sigmoid_mul(gate, attended.flatten(2), num_shares=layer.num_shares))
        return out


class Krea2Block(nn.Module):
    """Attention and a gated feed-forward network, each after a norm. table: what the block adds to the rows of the
    timestep, scale, shift and gate of either; None in the blocks of the text, which have no modulation."""

    def __init__(self, sizes: BlockSizes, eps: float, attention: AttentionLayer, *, is_modulated: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(_NUM_ROWS, sizes.dim)) if is_modulated else None
        self.attention_norm = RMSNorm(sizes.dim, eps)
        self.self_attention = Krea2Attention(sizes, eps, attention)
        self.ffn_norm = RMSNorm(sizes.dim, eps)
        self.feed_forward = GatedFeedForward(sizes.dim, sizes.ffn_dim)

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor | None,
        rotations: torch.Tensor | None,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Run the block; return x [B, tokens, D], overwritten. time: rows of the timestep, [6, B, D], with a table."""
        scale, shift, gate, ffn_scale, ffn_shift, ffn_gate = self._rows(time)
        norms = self.attention_norm.as_norm, self.ffn_norm.as_norm
        normalized = norm_for((self.self_attention.qkv_gate,), x, norms[0], shift=shift, scale=scale)
        attended = Branch(self.self_attention(normalized, rotations, context), gate)
        up = (self.feed_forward.up,)
        normalized = norm_for(up, x, norms[1], shift=ffn_shift, scale=ffn_scale, branch=attended)
        return add_branch_(x, Branch(self.feed_forward(normalized), ffn_gate))

    def modulated_input(self, x: torch.Tensor, time: torch.Tensor) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        scale, shift, *_ = self._rows(time)
        return ModulatedInput(modulated_norm(x, self.attention_norm.as_norm, shift=shift, scale=scale))

    def _rows(self, time: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if self.table is None or time is None:
            return (None,) * _NUM_ROWS
        return (time + self.table[:, None]).unbind()


class Krea2Transformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: Krea2TransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry

        def blocks(sizes: BlockSizes, kind: type[AttentionLayer], role: str, name: str, count: int) -> nn.ModuleList:
            def layer(index: int) -> AttentionLayer:
                info = LayerInfo(index, count, role, f"{name}.{index}.self_attention.attention")
                return kind(sizes.num_heads, sizes.head_dim, sizes.num_kv_heads, layer=info, policy=policy)

            modulated = role == "self"
            made = (Krea2Block(sizes, config.eps, layer(index), is_modulated=modulated) for index in range(count))
            return nn.ModuleList(made)

        text = config.text, LocalAttention
        self.text_layers = blocks(*text, LAYERS_ROLE, "text_layers", config.num_layer_blocks)
        self.text_mix = Linear(config.num_text_layers, 1, bias=False)
        self.text_refiner = blocks(*text, REFINER_ROLE, "text_refiner", config.num_refiner_blocks)
        self.text_norm = RMSNorm(config.text.dim, config.eps)
        self.text_embedding = FeedForward(config.text.dim, config.joint.dim, config.joint.dim)
        self.patch_embedding = Linear(config.patch_channels, config.joint.dim)
        self.timestep_embedding = FeedForward(config.num_waves, config.joint.dim, config.joint.dim)
        self.time_projection = Linear(config.joint.dim, _NUM_ROWS * config.joint.dim)
        self.blocks = blocks(config.joint, USPAttention, "self", "blocks", config.num_layers)
        self.out_table = nn.Parameter(torch.zeros(2, config.joint.dim))
        self.out_norm = RMSNorm(config.joint.dim, config.eps)
        self.out = Linear(config.joint.dim, config.patch_channels)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. Nothing attends to the text's padding, and the text has no positions, so that a sample
        does not depend on the others of its batch."""
        grid = self.geometry.grid(latents.shape)
        context = self.in_token_order(context, grid, latents.device)
        sharding, num_tokens, dtype = context.sharding, math.prod(grid), self.out.weight.dtype
        text = cached_for_prompt("text", inputs.text.embeddings, context, lambda: self._text(inputs.text, context))
        num_text_tokens = text.shape[1]
        rotations = cached_for_request(
            "rotations", (grid, num_text_tokens), context, lambda: self._rotations(grid, num_text_tokens, context)
        )
        tokens = patchify(latents.to(dtype), PATCH)
        x = torch.cat([sharding.shard(self.patch_embedding(tokens)), text], dim=1)
        embedded, time = self._time(timestep)
        layout = TokenLayout(
            grid, num_suffix_tokens=num_text_tokens, valid_lengths=inputs.text.lengths, tile=sharding.tile
        )
        joint = context.with_layout(layout)
        blocks = (overwriting(block, time, rotations, joint) for block in self.blocks)
        first, entering = self.blocks[0], x
        assert isinstance(first, Krea2Block)

        def modulated_input() -> ModulatedInput:
            with held_weights(first):
                return first.modulated_input(entering, time)

        (x,) = context.run_blocks(blocks, (x,), num_tokens, modulated_input)
        scale, shift = (embedded + self.out_table[:, None]).unbind()
        x = x[:, : x.shape[1] - num_text_tokens]
        tokens = self.out(modulated_norm(x, self.out_norm.as_norm, shift=shift, scale=scale))
        tokens = sharding.gather(tokens, num_tokens)
        return unpatchify(tokens, grid, PATCH, channels_first=True).to(latents.dtype)

    def _text(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the tokens [B, L, D] of a text, as many as the longest of the batch has."""
        layers = text.embeddings[:, : max(text.lengths)].to(self.out.weight.dtype)
        batch, num_tokens = layers.shape[:2]
        x = layers.reshape(batch * num_tokens, self.config.num_text_layers, -1).clone()
        across_layers = context.with_layout(TokenLayout.text(self.config.num_text_layers))
        for block in self.text_layers:
            x = block(x, None, None, across_layers)
        x = self.text_mix(x.transpose(1, 2)).view(batch, num_tokens, -1)
        across_tokens = context.with_layout(TokenLayout.text(num_tokens, text.lengths))
        for block in self.text_refiner:
            x = block(x, None, None, across_tokens)
        embedded: torch.Tensor = self.text_embedding(modulated_norm(x, self.text_norm.as_norm))
        return embedded

    def _time(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embedded timestep [B, D] and what is made of it for every block, [6, B, D]."""
        waves = timestep_waves(timestep / _TIME_SCALE * _TIME_SCALE, self.config.num_waves)
        embedded = self.timestep_embedding(waves.to(self.out.weight.dtype))
        rows = self.time_projection(F.gelu(embedded, approximate="tanh"))
        return embedded, rows.unflatten(-1, (_NUM_ROWS, -1)).transpose(0, 1)

    def _rotations(self, grid: tuple[int, int, int], num_text_tokens: int, context: AttentionContext) -> torch.Tensor:
        """Return [S + L, head_dim / 2], complex. The text is at position 0 on every axis."""
        axes = tuple(range(size) for size in grid)
        table = position_rotations(axes, self.config.axes, self.out.weight.device, self.config.theta)
        return followed_by_text(context.sharding.shard(table, dim=0), num_text_tokens)
