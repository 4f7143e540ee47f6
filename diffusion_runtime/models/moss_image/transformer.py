"""The MOSS-Image transformer (arXiv:2610.23374) on our attention layers, for inference.

    states of a language model -> text blocks -> text
    latents -> tokens, followed by the text -> num_layers x block -> modulated norm -> velocity

Picture and text share all weights of the blocks, and all blocks one modulation of the timestep. The picture stands
behind its text on one axis of the positions, and around 0 on those of rows and columns. The feed-forward networks are
gated by SiTU: both halves are bent at a large value instead of growing (4 tanh(a / 4) sigmoid(a) * 25 tanh(b / 25)).
Shapes in this file: B batch, S grid tokens, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Branch, add_branch_, modulated_norm
from diffusion_runtime.layers.embeddings import TimestepEmbedding, patchify, unpatchify
from diffusion_runtime.layers.linear import Linear, LinearInput
from diffusion_runtime.layers.modulation import norm_for
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import position_rotations
from diffusion_runtime.layers.rotated_attention import rotated_attention
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.moss_image.config import MossImageConfig
from diffusion_runtime.text_encoders.interface import Conditions

TEXT_ROLE = "moss_image.text_refiner"
_PATCH = (1, 1, 1)
_NUM_ROWS = 6
# Where SiTU bends the gate and the features.
_GATE_LIMIT, _FEATURE_LIMIT = 4.0, 25.0


class SituFeedForward(nn.Module):
    """down(situ(features, gate)), the halves of up(x)."""

    def __init__(self, dim: int, hidden_dim: int, *, bias: bool) -> None:
        super().__init__()
        self.up = Linear(dim, 2 * hidden_dim, bias=bias)
        self.down = Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: LinearInput) -> torch.Tensor:
        """[..., dim] to a new tensor like it. x may be quantised where `up` takes that."""
        features, gate = self.up(x).chunk(2, dim=-1)
        opened = _GATE_LIMIT * torch.tanh(gate / _GATE_LIMIT) * torch.sigmoid(gate)
        out: torch.Tensor = self.down(opened * (_FEATURE_LIMIT * torch.tanh(features / _FEATURE_LIMIT)))
        return out


class MossImageBlock(nn.Module):
    """Attention and a feed-forward network, each after a norm; biases in the blocks of the text alone."""

    def __init__(self, config: MossImageConfig, attention: AttentionLayer, *, bias: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.eps)
        self.qkv = Linear(config.dim, 3 * config.dim, bias=bias)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.out = Linear(config.dim, config.dim, bias=bias)
        self.ffn_norm = RMSNorm(config.dim, config.eps)
        self.feed_forward = SituFeedForward(config.dim, config.ffn_dim, bias=bias)
        self.attention = attention

    def forward(
        self, x: torch.Tensor, rows: torch.Tensor | None, rotations: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Run the block; return x [B, tokens, D], overwritten. rows: shift, scale and gate of attention and
        feed-forward, [6, B, D]; None for the text's. rotations: [B or nothing, tokens, head_dim / 2], complex."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (None,) * _NUM_ROWS if rows is None else rows.unbind()
        normed = norm_for((self.qkv,), x, self.norm.as_norm, shift=shift, scale=scale)
        product = self.qkv(normed).unflatten(-1, (3, self.attention.num_heads, -1))
        attended = rotated_attention(self.attention, product, (self.norm_q, self.norm_k), rotations, context)
        branch = Branch(self.out(attended.flatten(2)), gate)
        up = (self.feed_forward.up,)
        normed = norm_for(up, x, self.ffn_norm.as_norm, shift=ffn_shift, scale=ffn_scale, branch=branch)
        return add_branch_(x, Branch(self.feed_forward(normed), ffn_gate))


class MossImageTransformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: MossImageConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry

        def blocks(kind: type[AttentionLayer], role: str, name: str, count: int) -> nn.ModuleList:
            def layer(index: int) -> AttentionLayer:
                info = LayerInfo(index, count, role, f"{name}.{index}.attention")
                return kind(config.num_heads, config.head_dim, layer=info, policy=policy)

            made = (MossImageBlock(config, layer(index), bias=role == TEXT_ROLE) for index in range(count))
            return nn.ModuleList(made)

        self.patch_embedding = Linear(config.num_channels, config.dim)
        self.text_embedding = Linear(config.text_dim, config.dim)
        self.text_blocks = blocks(LocalAttention, TEXT_ROLE, "text_blocks", config.num_text_blocks)
        self.timestep_embedding = TimestepEmbedding(config.num_waves, config.dim, is_double=True)
        self.modulation = Linear(config.dim, _NUM_ROWS * config.dim)
        self.blocks = blocks(USPAttention, "self", "blocks", config.num_layers)
        self.out_modulation = Linear(config.dim, 2 * config.dim)
        self.out_norm = RMSNorm(config.dim, config.eps)
        self.out = Linear(config.dim, config.num_channels, bias=False)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. Nothing attends to the text's padding."""
        grid = self.geometry.grid(latents.shape)
        context = self.in_token_order(context, grid, latents.device)
        sharding, num_tokens, dtype = context.sharding, math.prod(grid), self.out.weight.dtype
        lengths = inputs.text.lengths
        text = cached_for_prompt("text", inputs.text.embeddings, context, lambda: self._text(inputs.text, context))
        rotations = cached_for_request(
            "rotations", (grid, lengths), context, lambda: self._rotations(grid, lengths, context)
        )
        x = torch.cat([sharding.shard(self.patch_embedding(patchify(latents.to(dtype), _PATCH))), text], dim=1)
        embedded = self.timestep_embedding(timestep)
        rows = self.modulation(embedded).unflatten(-1, (_NUM_ROWS, -1)).transpose(0, 1)
        layout = TokenLayout(grid, num_suffix_tokens=text.shape[1], valid_lengths=lengths, tile=sharding.tile)
        joint = context.with_layout(layout)
        first, entering = self.blocks[0], x
        assert isinstance(first, MossImageBlock)

        def modulated_input() -> ModulatedInput:
            with held_weights(first):
                return ModulatedInput(modulated_norm(entering, first.norm.as_norm, shift=rows[0], scale=rows[1]))

        blocks = (overwriting(block, rows, rotations, joint) for block in self.blocks)
        (x,) = context.run_blocks(blocks, (x,), num_tokens, modulated_input)
        shift, scale = self.out_modulation(embedded).chunk(2, dim=-1)
        x = x[:, : x.shape[1] - text.shape[1]]
        tokens = self.out(modulated_norm(x, self.out_norm.as_norm, shift=shift, scale=scale))
        return unpatchify(sharding.gather(tokens, num_tokens), grid, _PATCH).to(latents.dtype)

    def _text(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the tokens [B, L, D] of a text, as many as the longest of the batch has."""
        num_tokens = max(text.lengths)
        x: torch.Tensor = self.text_embedding(text.embeddings[:, :num_tokens].to(self.out.weight.dtype))
        rotations = self._text_rotations(num_tokens)
        layout = TokenLayout.text(num_tokens, text.lengths)
        for block in self.text_blocks:
            x = block(x, None, rotations, context.with_layout(layout))
        return x

    def _rotations(self, grid: tuple[int, int, int], lengths: Sequence[int], context: AttentionContext) -> torch.Tensor:
        """Return [B or nothing, S + L, head_dim / 2], complex: those of the picture, then of the text."""
        text = self._text_rotations(max(lengths))
        # Rows and columns are half a token from each other, on both sides of 0.
        sides = [range(1 - size, size, 2) for size in grid[1:]]
        made = []
        for length in lengths:
            axes = (range(1), range(length, length + 1), *sides)
            table = position_rotations(
                axes, self.config.axes, text.device, self.config.theta, scales=(1.0, 1.0, 0.5, 0.5)
            )
            made.append(torch.cat([context.sharding.shard(table, dim=0), text]))
        return made[0] if len(set(lengths)) == 1 else torch.stack(made)

    def _text_rotations(self, num_tokens: int) -> torch.Tensor:
        """Return [L, head_dim / 2]."""
        axes = (range(1), range(num_tokens), range(1), range(1))
        return position_rotations(axes, self.config.axes, self.out.weight.device, self.config.theta)
