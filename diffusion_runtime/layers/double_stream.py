"""Double-stream block (MM-DiT) and joint attention: grid and text streams with weights of their own, which share one
attention (Esser et al., arXiv:2403.03206).

Shapes: B batch, S grid tokens, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm
from diffusion_runtime.layers.linear import FeedForward, GatedFeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import (
    ApartTokens,
    BlockModulation,
    ModulatedBlock,
    add_gated_,
    modulated_layer_norm,
    norm_for,
)
from diffusion_runtime.layers.modulation_rows import ModulationRows
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate


class JointAttention(nn.Module):
    """Grid and text have their own projections and norms, and share one softmax. eps: of the norms, one per head. bias:
    of the projections. cached_keys: see AttentionLayer."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        layer: LayerInfo,
        policy: AttentionPolicy,
        bias: bool = True,
        cached_keys: bool = False,
    ) -> None:
        super().__init__()
        dim = num_heads * head_dim
        self.qkv = Linear(dim, 3 * dim, bias=bias)
        self.norm_q = RMSNorm(head_dim, eps)
        self.norm_k = RMSNorm(head_dim, eps)
        self.text_qkv = Linear(dim, 3 * dim, bias=bias)
        self.text_norm_q = RMSNorm(head_dim, eps)
        self.text_norm_k = RMSNorm(head_dim, eps)
        self.out = Linear(dim, dim, bias=bias)
        self.text_out = Linear(dim, dim, bias=bias)
        self.attention = USPAttention(num_heads, head_dim, layer=layer, policy=policy, cached_keys=cached_keys)

    def forward(
        self, x: LinearInput, text: LinearInput, rotations: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors like x [B, S, D] and text [B, L, D], either of which may be quantised where its projection takes
        that.

        rotations: [S + L, head_dim / 2], complex. context.layout: the grid with the text behind it.
        """
        streams = self._heads(self.qkv(x)), self._heads(self.text_qkv(text))
        norms = (self.norm_q, self.norm_k), (self.text_norm_q, self.text_norm_k)
        lengths = [x.shape[1], text.shape[1]]
        # q, k and v of both streams, each in one piece; they are written there as they are normalised and rotated.
        batch, _, _, *heads = streams[0].shape
        joint = streams[0].new_empty(3, batch, sum(lengths), *heads).movedim(0, 2)
        places, turns = torch.split(joint, lengths, dim=1), torch.split(rotations, lengths)
        for packed, pair, turn, place in zip(streams, norms, turns, places, strict=True):
            norm_and_rotate(packed, pair, turn, out=place, num_shares=self.attention.num_shares)
        attended = self.attention(*joint.unbind(2), context).flatten(2)
        attended_grid, attended_text = attended.split(lengths, dim=1)
        return self.out(attended_grid), self.text_out(attended_text)

    def heads_of_grid(self, x: LinearInput, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of tokens of the grid's weights without a text, [B, S, heads, head_dim] each. rotations: [S,
        head_dim / 2], complex."""
        packed, norms = self._heads(self.qkv(x)), (self.norm_q, self.norm_k)
        q, k, v = norm_and_rotate(packed, norms, rotations, num_shares=self.attention.num_shares)
        return q, k, v

    def _heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """[B, tokens, 3, heads, head_dim] of [B, tokens, 3 D]."""
        return qkv.view(*qkv.shape[:2], 3, self.attention.num_heads, -1)


class TwoStreams(nn.Module):
    """Joint attention, then a feed-forward network for each stream, modulated by six rows of each stream: shift, scale
    and gate of the attention, then of the feed-forward. A block derives from it and makes the parts; eps: of every
    norm."""

    eps: float
    joint_attention: JointAttention
    feed_forward: FeedForward | GatedFeedForward
    text_feed_forward: FeedForward | GatedFeedForward

    def run_streams(
        self,
        x: torch.Tensor,
        text: torch.Tensor,
        rows: Sequence[torch.Tensor],
        text_rows: Sequence[torch.Tensor],
        rotations: torch.Tensor,
        context: AttentionContext,
    ) -> None:
        """Overwrite x [B, S, D] and text [B, L, D].

        rows, text_rows: six times [B, D]. rotations: [S + L, head_dim / 2], complex. context.layout: the grid followed
        by the text.
        """
        attention, norm = self.joint_attention, Norm("layer", self.eps)
        branch, text_branch = attention(
            norm_for((attention.qkv,), x, norm, shift=rows[0], scale=rows[1]),
            norm_for((attention.text_qkv,), text, norm, shift=text_rows[0], scale=text_rows[1]),
            rotations,
            context,
        )
        self.feed(x, self.feed_forward, Branch(branch, rows[2]), rows[3:])
        self.feed(text, self.text_feed_forward, Branch(text_branch, text_rows[2]), text_rows[3:])

    def feed(
        self,
        x: torch.Tensor,
        feed_forward: FeedForward | GatedFeedForward,
        branch: Branch,
        rows: Sequence[torch.Tensor],
    ) -> None:
        """Add the attention's branch to x, then the feed-forward network's."""
        shift, scale, gate = rows
        norm = Norm("layer", self.eps)
        normalized = norm_for((feed_forward.up,), x, norm, shift=shift, scale=scale, branch=branch)
        add_gated_(x, feed_forward(normalized), gate)


class _Run(NamedTuple):
    """Tokens of a stream that are modulated alike. rows: see DoubleStreamBlock."""

    tokens: slice
    rows: Sequence[torch.Tensor]


class DoubleStreamBlock(TwoStreams, ModulatedBlock):
    """A block of two streams, each modulated by rows of its own."""

    def __init__(
        self, num_heads: int, head_dim: int, ffn_dim: int, eps: float, *, layer: LayerInfo, policy: AttentionPolicy
    ) -> None:
        super().__init__()
        dim = num_heads * head_dim
        self.eps = eps
        self.modulation = BlockModulation(dim, 6)
        self.text_modulation = BlockModulation(dim, 6)
        self.joint_attention = JointAttention(num_heads, head_dim, eps, layer=layer, policy=policy)
        self.feed_forward = FeedForward(dim, ffn_dim)
        self.text_feed_forward = FeedForward(dim, ffn_dim)

    @property
    def modulations(self) -> tuple[BlockModulation, ...]:
        return self.modulation, self.text_modulation

    def forward(
        self,
        x: torch.Tensor,
        text: torch.Tensor,
        stacked: torch.Tensor,
        text_stacked: torch.Tensor,
        rotations: torch.Tensor,
        context: AttentionContext,
        apart: ApartTokens | None = None,
    ) -> None:
        """x [B, S, D] and text [B, L, D] are overwritten.

        stacked, text_stacked: the rows of each stream, [6, B, D]. rotations: [S + L, head_dim / 2], complex.
        context.layout: the grid with the text behind it. apart: tokens of x with a timestep of their own.
        """
        rows, text_rows = stacked.unbind(), text_stacked.unbind()
        if apart is not None:
            self._forward_apart(x, text, rows, text_rows, apart, rotations, context)
            return
        self.run_streams(x, text, rows, text_rows, rotations, context)

    def modulated_input(self, x: torch.Tensor, rows: ModulationRows) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        shift, scale, *_ = rows.of(self.modulation).unbind()
        return ModulatedInput(modulated_layer_norm(x, shift, scale, self.eps))

    def _forward_apart(
        self,
        x: torch.Tensor,
        text: torch.Tensor,
        rows: Sequence[torch.Tensor],
        text_rows: Sequence[torch.Tensor],
        apart: ApartTokens,
        rotations: torch.Tensor,
        context: AttentionContext,
    ) -> None:
        """`forward` of x in two runs of tokens."""
        runs = [
            _Run(tokens, apart.rows.unbind() if are_apart else rows) for tokens, are_apart in apart.split(x.shape[1])
        ]
        branch, text_branch = self.joint_attention(
            self._modulated(x, runs, 0),
            modulated_layer_norm(text, text_rows[0], text_rows[1], self.eps),
            rotations,
            context,
        )
        out = self.feed_forward(self._modulated(x, runs, 3, branch))
        for tokens, of_run in runs:
            add_gated_(x[:, tokens], out[:, tokens], of_run[5])
        self.feed(text, self.text_feed_forward, Branch(text_branch, text_rows[2]), text_rows[3:])

    def _modulated(
        self, x: torch.Tensor, runs: Sequence[_Run], first: int, branch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norm of x with rows `first` and after it of each run for shift and scale. branch: added to x
        before, gated by the row before them."""
        out = torch.empty_like(x)
        for tokens, rows in runs:
            added = None if branch is None else Branch(branch[:, tokens], rows[first - 1])
            part, place = x[:, tokens], out[:, tokens]
            modulated_layer_norm(part, rows[first], rows[first + 1], self.eps, branch=added, out=place)
        return out


def modulated_input(blocks: nn.ModuleList, x: torch.Tensor, rows: ModulationRows) -> ModulatedInput:
    """Return the tensor that TeaCache compares in a model of DoubleStreamBlocks; x as the first of them gets it."""
    first = blocks[0]
    assert isinstance(first, DoubleStreamBlock)
    return first.modulated_input(x, rows)
