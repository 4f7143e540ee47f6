"""The blocks of FLUX.2: without biases, and modulated by rows that all blocks of a kind share.

With caches_references the tokens of reference images go through `prefill` once, where they attend to each other alone;
`forward` attends to the keys and values that it returned, which the context has as its prefix.

Shapes: B batch, S grid tokens, R tokens of references, L text tokens, T grid and text, D width (num_heads * head_dim).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm
from diffusion_runtime.layers.double_stream import JointAttention, TwoStreams
from diffusion_runtime.layers.linear import GatedFeedForward, Linear
from diffusion_runtime.layers.modulation import add_gated_, norm_for
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate
from diffusion_runtime.models.flux2.config import Flux2TransformerConfig


class Flux2DoubleBlock(TwoStreams):
    """Block in which grid and text have weights of their own and meet in the attention (MM-DiT, Esser et al.,
    arXiv:2403.03206)."""

    def __init__(self, config: Flux2TransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        self.joint_attention = JointAttention(
            config.num_heads,
            config.head_dim,
            config.eps,
            layer=_of_steps(config, layer),
            policy=policy,
            bias=False,
            cached_keys=config.caches_references,
        )
        self.reference_attention = _reference_attention(config, layer, policy)
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
        """Run the block; x [B, S, D] and text [B, L, D] are overwritten.

        rows, text_rows: six times [B, D]: shift, scale and gate of the attention, then of the feed-forward. rotations:
        [S + L, head_dim / 2], complex. context.layout: the grid followed by the text.
        """
        self.run_streams(x, text, rows, text_rows, rotations, context)

    def prefill(
        self, x: torch.Tensor, rows: Sequence[torch.Tensor], rotations: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block on x [B, R, D], tokens of references, which is overwritten; return their keys and values, [B,
        R, heads, head_dim].

        rows: six times [B, D], as in `forward`. rotations: [R, head_dim / 2], complex. context.layout: None.
        """
        assert self.reference_attention is not None
        attention = self.joint_attention
        normalized = norm_for((attention.qkv,), x, Norm("layer", self.eps), shift=rows[0], scale=rows[1])
        q, k, v = attention.heads_of_grid(normalized, rotations)
        attended = self.reference_attention(q, k, v, context).flatten(2)
        self.feed(x, self.feed_forward, Branch(attention.out(attended), rows[2]), rows[3:])
        return _own_memory(k), _own_memory(v)


class Flux2SingleBlock(nn.Module):
    """Block with grid and text in one sequence; attention and a gated feed-forward run side by side (Dehghani et al.,
    arXiv:2302.05442). One projection makes q, k, v, and gate and features of the feed-forward; one takes attention and
    gated features back."""

    def __init__(self, config: Flux2TransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        self.qkv_up = Linear(config.dim, 3 * config.dim + 2 * config.ffn_dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.out = Linear(config.dim + config.ffn_dim, config.dim, bias=False)
        self.attention = USPAttention(
            config.num_heads,
            config.head_dim,
            layer=_of_steps(config, layer),
            policy=policy,
            cached_keys=config.caches_references,
        )
        self.reference_attention = _reference_attention(config, layer, policy)

    def forward(
        self, x: torch.Tensor, rows: Sequence[torch.Tensor], rotations: torch.Tensor, context: AttentionContext
    ) -> None:
        """Run the block; x [B, T, D] is overwritten.

        rows: shift, scale and gate, [B, D] each. rotations: [T, head_dim / 2], complex. context.layout: the grid
        followed by the text.
        """
        projected = self._project(x, rows)
        q, k, v = self._heads(projected, rotations)
        self._add_branch(x, projected, self.attention(q, k, v, context), v, rows[2])

    def prefill(
        self, x: torch.Tensor, rows: Sequence[torch.Tensor], rotations: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the block on tokens of references, as Flux2DoubleBlock.prefill; rows: shift, scale and gate."""
        assert self.reference_attention is not None
        projected = self._project(x, rows)
        q, k, v = self._heads(projected, rotations)
        kept = _own_memory(k), _own_memory(v)
        self._add_branch(x, projected, self.reference_attention(q, k, v, context), v, rows[2])
        return kept

    def _project(self, x: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return q, k, v, gate and features, [B, T, 3 D + 2 ffn_dim]."""
        projected: torch.Tensor = self.qkv_up(
            norm_for((self.qkv_up,), x, Norm("layer", self.eps), shift=rows[0], scale=rows[1])
        )
        return projected

    def _heads(
        self, projected: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_heads = self.attention.num_heads
        qkv = projected[..., : 3 * num_heads * self.attention.head_dim]
        packed = torch.unflatten(qkv, -1, (3, num_heads, -1))
        norms, shares = (self.norm_q, self.norm_k), self.attention.num_shares
        q, k, v = norm_and_rotate(packed, norms, rotations, num_shares=shares)
        return q, k, v

    def _add_branch(
        self, x: torch.Tensor, projected: torch.Tensor, attended: torch.Tensor, v: torch.Tensor, row: torch.Tensor
    ) -> None:
        """Add the projection of the attention's output and the gated features to x. projected and v in it are
        overwritten. row: the gate, [B, D]."""
        dim = self.attention.num_heads * self.attention.head_dim
        ffn_dim = self.out.in_features - dim
        _, gate, features = torch.split(projected, [3 * dim, ffn_dim, ffn_dim], dim=-1)
        if self.out.takes_quantized(attended):
            add_gated_(x, self.out.forward_joined(attended.flatten(2), gate, features), row)
            return
        silu_mul(gate, features, in_place=True, num_shares=self.out.num_shares)
        if self.out.runs_in_parts(x):
            # Without a copy of the attention output: 76 us at 4608 tokens on an H200.
            branch = self.out.forward_pair(attended.flatten(2), gate)
        else:
            # In the place of v and of the gate, which are adjacent: a concatenation would copy both.
            v.copy_(attended)
            # As a matrix: its rows have a stride, and a linear map of three dimensions would copy them first.
            rows_of_both = projected.flatten(0, 1)[:, 2 * dim : 3 * dim + ffn_dim]
            branch = self.out(rows_of_both).view(x.shape)
        add_gated_(x, branch, row)


def _of_steps(config: Flux2TransformerConfig, layer: LayerInfo) -> LayerInfo:
    """Return the layer for the calls of the steps, when another one computes references before them."""
    return dataclasses.replace(layer, phase="denoise") if config.caches_references else layer


def _reference_attention(
    config: Flux2TransformerConfig, layer: LayerInfo, policy: AttentionPolicy
) -> LocalAttention | None:
    """Return the attention of references among themselves, which every process holds, with the layer's own choice of
    backend."""
    if not config.caches_references:
        return None
    of_prefill = dataclasses.replace(layer, phase="commit")
    return LocalAttention(config.num_heads, config.head_dim, layer=of_prefill, policy=policy, cached_keys=True)


def _own_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a copy: k and v are views of a tensor that also holds q."""
    return x.clone(memory_format=torch.contiguous_format)
