"""The blocks of FLUX.2: without biases, and modulated by rows that all blocks of a kind share.

Shapes: B batch, S grid tokens, L text tokens, T both, D width (num_heads * head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm
from diffusion_runtime.layers.double_stream import JointAttention
from diffusion_runtime.layers.linear import GatedFeedForward, Linear
from diffusion_runtime.layers.modulation import add_gated_, norm_for
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate
from diffusion_runtime.models.flux2.config import Flux2TransformerConfig
from diffusion_runtime.step_info import LayerInfo


class Flux2DoubleBlock(nn.Module):
    """Grid and text have weights of their own and meet in the attention (MM-DiT, Esser et al., arXiv:2403.03206)."""

    def __init__(self, config: Flux2TransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        self.joint_attention = JointAttention(
            config.num_heads, config.head_dim, config.eps, layer=layer, policy=policy, bias=False
        )
        self.feed_forward = GatedFeedForward(config.dim, config.ffn_dim)
        self.text_feed_forward = GatedFeedForward(config.dim, config.ffn_dim)

    def forward(
        self,
        x: torch.Tensor,
        text: torch.Tensor,
        rows: Sequence[torch.Tensor],
        text_rows: Sequence[torch.Tensor],
        rotations: torch.Tensor,
        context: AttentionContext,
    ) -> None:
        """x [B, S, D] and text [B, L, D] are overwritten.

        rows, text_rows: six times [B, D]: shift, scale and gate of the attention, then of the feed-forward.
        rotations: [S + L, head_dim / 2], complex. context.layout: the grid with the text behind it.
        """
        attention, norm = self.joint_attention, Norm("layer", self.eps)
        branch, text_branch = attention(
            norm_for((attention.qkv,), x, norm, shift=rows[0], scale=rows[1]),
            norm_for((attention.text_qkv,), text, norm, shift=text_rows[0], scale=text_rows[1]),
            rotations,
            context,
        )
        self._feed_forward(x, self.feed_forward, Branch(branch, rows[2]), rows[3:])
        self._feed_forward(text, self.text_feed_forward, Branch(text_branch, text_rows[2]), text_rows[3:])

    def _feed_forward(
        self, x: torch.Tensor, feed_forward: GatedFeedForward, branch: Branch, rows: Sequence[torch.Tensor]
    ) -> None:
        """Add the attention's branch to x, then the feed-forward network's."""
        shift, scale, gate = rows
        norm = Norm("layer", self.eps)
        normalized = norm_for((feed_forward.up,), x, norm, shift=shift, scale=scale, branch=branch)
        add_gated_(x, feed_forward(normalized), gate)


class Flux2SingleBlock(nn.Module):
    """Grid and text are one sequence; attention and a gated feed-forward run side by side (Dehghani et al.,
    arXiv:2302.05442). One projection makes q, k, v, and gate and features of the feed-forward; one takes attention and
    gated features back."""

    def __init__(self, config: Flux2TransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        self.qkv_up = Linear(config.dim, 3 * config.dim + 2 * config.ffn_dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.out = Linear(config.dim + config.ffn_dim, config.dim, bias=False)
        self.attention = USPAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)

    def forward(
        self, x: torch.Tensor, rows: Sequence[torch.Tensor], rotations: torch.Tensor, context: AttentionContext
    ) -> None:
        """x [B, T, D] is overwritten.

        rows: shift, scale and gate, [B, D] each. rotations: [T, head_dim / 2], complex. context.layout: the
        grid with the text behind it.
        """
        projected = self.qkv_up(norm_for((self.qkv_up,), x, Norm("layer", self.eps), shift=rows[0], scale=rows[1]))
        dim = self.attention.num_heads * self.attention.head_dim
        ffn_dim = self.out.in_features - dim
        qkv, gate, features = projected.split([3 * dim, ffn_dim, ffn_dim], dim=-1)
        packed = qkv.unflatten(-1, (3, self.attention.num_heads, -1))
        q, k, v = norm_and_rotate(packed, (self.norm_q, self.norm_k), rotations)
        attended = self.attention(q, k, v, context)
        if self.out.takes_quantized(attended):
            add_gated_(x, self.out.forward_joined(attended.flatten(2), gate, features), rows[2])
            return
        silu_mul(gate, features, in_place=True)
        if self.out.runs_in_parts(x):
            # Without a copy of the attention output: 76 us at 4608 tokens on an H200.
            branch = self.out.forward_pair(attended.flatten(2), gate)
        else:
            # In the place of v and of the gate, which are beside each other: a concatenation would copy both.
            v.copy_(attended)
            # As a matrix: its rows have a stride, and a linear map of three dimensions would copy them first.
            rows_of_both = projected.flatten(0, 1)[:, 2 * dim : 3 * dim + ffn_dim]
            branch = self.out(rows_of_both).view(x.shape)
        add_gated_(x, branch, rows[2])
