"""The two-layer network of a transformer block."""

from __future__ import annotations

import torch
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
