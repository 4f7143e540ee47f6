"""Feed-forward networks (MLP) of a transformer block: GELU, and gated (SwiGLU)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.layers.linear import Linear


class FeedForward(nn.Module):
    """down(gelu(up(x))), with the tanh form of GELU. out_dim: None is dim."""

    def __init__(self, dim: int, hidden_dim: int, out_dim: int | None = None) -> None:
        super().__init__()
        self.up = Linear(dim, hidden_dim)
        self.down = Linear(hidden_dim, dim if out_dim is None else out_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] to [..., out_dim]."""
        out: torch.Tensor = self.down(self.up.forward_gelu(x))
        return out


class GatedFeedForward(nn.Module):
    """down(silu(a) * b), where a and b are the halves of up(x) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = Linear(dim, 2 * hidden_dim, bias=bias)
        self.down = Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] to a new tensor like it."""
        gate, hidden = self.up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down(F.silu(gate).mul_(hidden))
        return out
