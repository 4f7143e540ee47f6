"""Joint attention of grid and text tokens (MM-DiT, Esser et al., arXiv:2403.03206).

The text stands behind the grid, so that its padding, and nothing else, is the end of the sequence. Shapes: B batch, S
grid tokens, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import rotate
from diffusion_runtime.step_info import LayerInfo


class JointAttention(nn.Module):
    """Grid and text have their own projections and norms, and share one softmax. eps: of the norms, one per head. bias:
    of the projections."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        layer: LayerInfo,
        policy: AttentionPolicy,
        bias: bool = True,
    ) -> None:
        super().__init__()
        dim = num_heads * head_dim
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim, bias=bias)
        self.norm_q = RMSNorm(head_dim, eps)
        self.norm_k = RMSNorm(head_dim, eps)
        self.text_qkv = Linear(dim, 3 * dim, bias=bias)
        self.text_norm_q = RMSNorm(head_dim, eps)
        self.text_norm_k = RMSNorm(head_dim, eps)
        self.out = Linear(dim, dim, bias=bias)
        self.text_out = Linear(dim, dim, bias=bias)
        self.attention = USPAttention(num_heads, head_dim, layer=layer, policy=policy)

    def forward(
        self, x: torch.Tensor, text: torch.Tensor, rotations: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors like x [B, S, D] and text [B, L, D].

        rotations: [S + L, head_dim / 2], complex. context.layout: the grid with the text behind it.
        """
        q, k, v = self._heads(self.qkv(x))
        text_q, text_k, text_v = self._heads(self.text_qkv(text))
        q = rotate(torch.cat([self.norm_q(q), self.text_norm_q(text_q)], dim=1), rotations)
        k = rotate(torch.cat([self.norm_k(k), self.text_norm_k(text_k)], dim=1), rotations)
        attended = self.attention(q, k, torch.cat([v, text_v], dim=1), context).flatten(2)
        attended_grid, attended_text = attended.split([x.shape[1], text.shape[1]], dim=1)
        return self.out(attended_grid), self.text_out(attended_text)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v [B, tokens, heads, head_dim] of [B, tokens, 3 D]."""
        return qkv.view(*qkv.shape[:2], 3, self.num_heads, -1).unbind(2)
