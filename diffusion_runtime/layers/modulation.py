"""adaLN (adaptive layer norm): shift, scale and gate from the timestep (Peebles and Xie, arXiv:2212.09748)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.layers.linear import Linear


class Modulation(nn.Module):
    """Rows of shift, scale or gate from a conditioning vector, in the model's own order."""

    def __init__(self, dim: int, num_rows: int, *, bias: bool = True) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.projection = Linear(dim, num_rows * dim, bias=bias)

    def forward(self, conditioning: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[batch, dim], after its activation, to num_rows times float32 [batch, dim]."""
        rows: torch.Tensor = self.projection(conditioning)
        return rows.float().chunk(self.num_rows, dim=-1)


def modulated_layer_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """layer_norm(x) * (1 + scale) + shift, in float32; a new tensor of x's dtype.

    x: [batch, seq, dim]; shift, scale: [batch, dim], float32.
    """
    scale = scale + 1.0
    if x.shape[0] == 1:
        # One sample: scale and shift are the weight and bias of a layer norm, so one pass does it all.
        return F.layer_norm(x.float(), x.shape[-1:], scale[0], shift[0], eps).to(x.dtype)
    normalized = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return normalized.mul_(scale[:, None]).add_(shift[:, None]).to(x.dtype)


def modulated_rms_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) * (1 + scale) + shift; a new tensor of x's dtype. Shapes as in modulated_layer_norm.

    Norm and modulation are computed in float32, and each is rounded once: two passes over x in its own dtype take a
    third of the memory traffic of float32 in between.
    """
    normalized = F.rms_norm(x, x.shape[-1:], eps=eps)
    return torch.addcmul(shift[:, None], normalized, (scale + 1.0)[:, None], out=normalized)


def add_gated_(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + branch * gate, written into x.

    x, branch: [batch, seq, dim] of one dtype; gate: [batch, dim], float32. Summed in float32, rounded once.
    """
    return x.addcmul_(branch, gate[:, None])
