"""Single-stream block: attention and feed-forward in parallel (Dehghani et al., arXiv:2302.05442), on one sequence of
grid and text.

Shapes: B batch, T tokens of grid and text, D width (num_heads * head_dim).
"""

from __future__ import annotations

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.kernels.modulated_norm.api import Norm
from diffusion_runtime.layers.linear import Linear, LinearInput
from diffusion_runtime.layers.modulation import (
    ApartTokens,
    BlockModulation,
    ModulatedBlock,
    add_gated_,
    norm_for,
)
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate
from diffusion_runtime.layers.rotated_attention import rotated_attention
from diffusion_runtime.layers.token_runs import add_gated_by_run_, modulated_by_run


class SingleStreamBlock(ModulatedBlock):
    """One projection computes q, k, v and the hidden features of the feed-forward; one maps attention output and
    features back.

    eps: of every norm.
    """

    def __init__(
        self, num_heads: int, head_dim: int, ffn_dim: int, eps: float, *, layer: LayerInfo, policy: AttentionPolicy
    ) -> None:
        super().__init__()
        dim = num_heads * head_dim
        self.eps = eps
        self.modulation = BlockModulation(dim, 3)
        self.qkv_up = Linear(dim, 3 * dim + ffn_dim)
        self.norm_q = RMSNorm(head_dim, eps)
        self.norm_k = RMSNorm(head_dim, eps)
        self.out = Linear(dim + ffn_dim, dim)
        self.attention = USPAttention(num_heads, head_dim, layer=layer, policy=policy)

    def forward(
        self,
        x: torch.Tensor,
        stacked: torch.Tensor,
        rotations: torch.Tensor,
        context: AttentionContext,
        apart: ApartTokens | None = None,
    ) -> None:
        """x [B, T, D] is overwritten.

        stacked: the rows of shift, scale and gate, [3, B, D]. rotations: [T, head_dim / 2], complex. context.layout:
        the grid with the text behind it. apart: tokens of x with a timestep of their own.
        """
        shift, scale, gate = stacked.unbind()
        if apart is not None:
            parts = apart.split(x.shape[1])
            runs = [(tokens, apart.rows if are_apart else stacked) for tokens, are_apart in parts]
            shifts = [(tokens, rows[0], rows[1]) for tokens, rows in runs]
            branch = self._branch(modulated_by_run(x, Norm("layer", self.eps), shifts), rotations, context)
            add_gated_by_run_(x, branch, [(tokens, rows[2]) for tokens, rows in runs])
            return
        normalized = norm_for((self.qkv_up,), x, Norm("layer", self.eps), shift=shift, scale=scale)
        add_gated_(x, self._branch(normalized, rotations, context), gate)

    def _branch(self, x: LinearInput, rotations: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Attention and feed-forward of x [B, T, D], a new tensor."""
        norms, dim = (self.norm_q, self.norm_k), self.attention.num_heads * self.attention.head_dim
        num_features = 3 * dim
        if isinstance(x, torch.Tensor) and self._runs_in_parts(x):
            # In two products each: the GELU is in the epilogue of one, and attention output is not copied next to the
            # features. 1.35 instead of 1.45 ms at FLUX.1's 4608 tokens on an H200.
            product = self.qkv_up.forward_first(x, num_features)
            packed = torch.unflatten(product, -1, (3, self.attention.num_heads, -1))
            hidden = self.qkv_up.forward_gelu_from(x, num_features)
            attended = rotated_attention(self.attention, packed, norms, rotations, context)
            return self.out.forward_pair(attended.flatten(2), hidden)
        projected = self.qkv_up(x)
        packed = projected[..., :num_features].unflatten(-1, (3, self.attention.num_heads, -1))
        q, k, v = norm_and_rotate(packed, norms, rotations, num_shares=self.attention.num_shares)
        attended = self.attention(q, k, v, context)
        if self.out.takes_quantized(attended):
            return self.out.forward_joined(attended.flatten(2), projected[..., num_features:])
        # The attention output overwrites v, next to the features: a concatenation would copy all of them, in a long
        # video several GB.
        v.copy_(attended)
        # As a matrix: its rows have a stride, and a linear map of three dimensions would copy them first.
        return self.out.forward_gelu_of_last(projected.flatten(0, 1)[:, 2 * dim :], dim).view(x.shape)

    def _runs_in_parts(self, x: torch.Tensor) -> bool:
        return x.numel() > 0 and self.qkv_up.runs_in_parts(x) and self.out.runs_in_parts(x)
