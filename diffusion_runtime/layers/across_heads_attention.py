"""Self- and cross-attention with QK norm across all heads, and rotary positions that differ from head to head.

Head gates, where a model has them: what each head attended to, times 2 * sigmoid of a projection of the layer's input,
so that weights of 0 change nothing. Shapes: B batch, S tokens, D width.
"""

from __future__ import annotations

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.layers.linear import Linear, LinearInput
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate
from diffusion_runtime.layers.rotated_attention import rotated_attention

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class AcrossHeadsSelfAttention(nn.Module):
    """Attention among the tokens of a stream. eps: of the norms of q and k. has_gates: one for each head."""

    def __init__(self, dim: int, eps: float, attention: AttentionLayer, *, has_gates: bool = False) -> None:
        super().__init__()
        self.qkv = Linear(dim, 3 * dim)
        self.norm_q = RMSNorm(dim, eps)
        self.norm_k = RMSNorm(dim, eps)
        self.out = Linear(dim, dim)
        self.head_gate = Linear(dim, attention.num_heads_total) if has_gates else None
        self.attention = attention

    @property
    def input_layers(self) -> tuple[Linear, ...]:
        """The layers that read x."""
        return (self.qkv,) if self.head_gate is None else (self.qkv, self.head_gate)

    def forward(
        self, x: LinearInput, rotations: torch.Tensor, context: AttentionContext, *, takes_values_alone: bool = False
    ) -> torch.Tensor:
        """x: [B, S, D]; rotations: [S, heads, head_dim / 2] of all heads, complex; context.layout: the stream.
        takes_values_alone: each token takes its own value instead of attending, as spatio-temporal guidance perturbs a
        model (Hyung et al., arXiv:2411.18664)."""
        product = self.qkv(x).unflatten(-1, (3, self.attention.num_heads, -1))
        if takes_values_alone:
            attended = product[:, :, 2]
        else:
            attended = rotated_attention(self.attention, product, (self.norm_q, self.norm_k), rotations[None], context)
        out: torch.Tensor = self.out(_gated(attended, self.head_gate, x).flatten(2))
        return out


class AcrossHeadsCrossAttention(nn.Module):
    """Attention from the tokens of a stream to those of something else. inner_dim: of what lies in between. eps: of
    the norms of q and k. has_gates: one for each head.

    rotations, where given: [tokens, heads, head_dim / 2], complex.
    """

    def __init__(
        self,
        dim: int,
        source_dim: int,
        inner_dim: int,
        eps: float,
        attention: AttentionLayer,
        *,
        has_gates: bool = False,
    ) -> None:
        super().__init__()
        self.q = Linear(dim, inner_dim)
        self.kv = Linear(source_dim, 2 * inner_dim)
        self.norm_q = RMSNorm(inner_dim, eps)
        self.norm_k = RMSNorm(inner_dim, eps)
        self.out = Linear(inner_dim, dim)
        self.head_gate = Linear(dim, attention.num_heads_total) if has_gates else None
        self.attention = attention

    @property
    def input_layers(self) -> tuple[Linear, ...]:
        """The layers that read x."""
        return (self.q,) if self.head_gate is None else (self.q, self.head_gate)

    def keys_and_values(self, source: LinearInput, rotations: torch.Tensor | None = None) -> KeysAndValues:
        """Return keys and values, each [B, tokens, heads, head_dim], of a source [B, tokens, source_dim]."""
        k, v = self._turned(self.kv(source), 2, self.norm_k, rotations)
        return k, v

    def forward(
        self,
        x: LinearInput,
        keys_and_values: KeysAndValues,
        context: AttentionContext,
        rotations: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [B, S, D]; context.layout: the keys."""
        (q,) = self._turned(self.q(x), 1, self.norm_q, rotations)
        attended = self.attention(q, *keys_and_values, context)
        out: torch.Tensor = self.out(_gated(attended, self.head_gate, x).flatten(2))
        return out

    def _turned(
        self, product: torch.Tensor, num_parts: int, norm: RMSNorm, rotations: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        packed = torch.unflatten(product, -1, (num_parts, self.attention.num_heads, -1))
        return norm_and_rotate(packed, (norm,), None if rotations is None else rotations[None])


def _gated(attended: torch.Tensor, gate: Linear | None, x: LinearInput) -> torch.Tensor:
    """attended [B, S, heads, head_dim] times the gate of each head. x: [B, S, D], the layer's input."""
    if gate is None:
        return attended
    # Quantised tokens are read by 8-bit layers alone, which declare it (Linear.takes_quantized).
    return attended * (2.0 * torch.sigmoid(gate(x)))[..., None]
