"""Token refiner: self-attention among the text tokens, gated by timestep and text, before the transformer (Kong et al.,
arXiv:2412.03603, section 4.3). It gives the tokens of a causal language model the context that follows them.

Shapes: B batch, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Branch
from diffusion_runtime.layers.embeddings import TimestepEmbedding, VectorEmbedding
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation import Modulation, add_gated_
from diffusion_runtime.layers.norm import LayerNorm

EPS = 1e-6
HIDDEN_RATIO = 4


@dataclass(frozen=True)
class UnrefinedText:
    """The refiner's input; it depends on the prompts alone.

    tokens: [B, L, D], valid ones first. lengths: of each sample. mean: of each sample's embeddings, [B, D], through its
    network.
    """

    tokens: torch.Tensor
    lengths: tuple[int, ...]
    mean: torch.Tensor


class TokenRefinerBlock(nn.Module):
    """Self-attention of the text, then a feed-forward network, each with a layer norm before and a gate after."""

    def __init__(self, num_heads: int, head_dim: int, *, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__()
        dim = num_heads * head_dim
        self.gates = Modulation(dim, 2)
        self.norm = LayerNorm(dim, EPS)
        self.qkv = Linear(dim, 3 * dim)
        self.out = Linear(dim, dim)
        self.feed_forward_norm = LayerNorm(dim, EPS)
        self.up = Linear(dim, HIDDEN_RATIO * dim)
        self.down = Linear(HIDDEN_RATIO * dim, dim)
        self.attention = LocalAttention(num_heads, head_dim, layer=layer, policy=policy)

    def forward(self, x: torch.Tensor, conditioning: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [B, L, D] is overwritten. conditioning: [B, D], after its activation. context.layout: the text."""
        gate, feed_forward_gate = self.gates(conditioning)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.attention.num_heads, -1)).unbind(2)
        branch = Branch(self.out(self.attention(q, k, v, context).flatten(2)), gate)
        hidden = F.silu(self.up(self.feed_forward_norm(x, branch)))
        return add_gated_(x, self.down(hidden), feed_forward_gate)


class TokenRefiner(nn.Module):
    """text_dim: of the text encoder. num_waves: channels of the sinusoidal timestep. role: of its attention layers;
    name: where it is in its model, for messages."""

    def __init__(
        self,
        text_dim: int,
        num_heads: int,
        head_dim: int,
        num_layers: int,
        *,
        num_waves: int,
        role: str,
        name: str,
        policy: AttentionPolicy,
    ) -> None:
        super().__init__()
        dim = num_heads * head_dim
        self.timestep = TimestepEmbedding(num_waves, dim)
        self.mean = VectorEmbedding(text_dim, dim)
        self.projection = Linear(text_dim, dim)
        self.blocks = nn.ModuleList(
            TokenRefinerBlock(
                num_heads,
                head_dim,
                layer=LayerInfo(index, num_layers, role, f"{name}.blocks.{index}"),
                policy=policy,
            )
            for index in range(num_layers)
        )

    def prepare(self, embeddings: torch.Tensor, lengths: Sequence[int]) -> UnrefinedText:
        """embeddings: [B, tokens, text_dim], valid ones first. Padding behind the longest text is removed."""
        embeddings = embeddings[:, : max(1, *lengths)].to(self.projection.weight.dtype)
        # Of the valid tokens alone. An empty text has no mean; nothing attends to its tokens either.
        means = [
            sample[:length].sum(0, dtype=torch.float32) for sample, length in zip(embeddings, lengths, strict=True)
        ]
        counts = torch.tensor([max(1, length) for length in lengths], dtype=torch.float32)[:, None]
        mean = torch.stack(means) / counts.to(embeddings.device)
        return UnrefinedText(self.projection(embeddings), tuple(lengths), self.mean(mean.to(embeddings.dtype)))

    def forward(self, text: UnrefinedText, timestep: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[B, L, D], a new tensor. timestep: [B], in [0, 1000]."""
        conditioning = F.silu(self.timestep(timestep) + text.mean)
        context = context.with_layout(TokenLayout.text(text.tokens.shape[1], text.lengths))
        x = text.tokens.clone()
        for block in self.blocks:
            x = block(x, conditioning, context)
        return x
