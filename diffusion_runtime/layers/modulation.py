"""adaLN (adaptive layer norm): shift, scale and gate from the timestep (Peebles and Xie, arXiv:2212.09748)."""

from __future__ import annotations

import torch
from torch import nn

from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_, modulated_norm
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


def modulated_layer_norm(
    x: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    *,
    branch: Branch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """layer_norm(x) * (1 + scale) + shift, in float32; of x's dtype.

    x: [batch, seq, dim]; shift, scale: [batch, dim], float32. branch: added to x first, in place. out: written and
    returned; None is a new tensor.
    """
    return modulated_norm(x, Norm("layer", eps), shift=shift, scale=scale, branch=branch, out=out)


def modulated_rms_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float, *, branch: Branch | None = None
) -> torch.Tensor:
    """rms_norm(x) * (1 + scale) + shift; a new tensor of x's dtype. Shapes and branch as in modulated_layer_norm."""
    return modulated_norm(x, Norm("rms", eps), shift=shift, scale=scale, branch=branch)


def add_gated_(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + branch * gate, written into x.

    x, branch: [batch, seq, dim] of one dtype; gate: [batch, dim], float32. Summed in float32, rounded once.
    """
    return add_branch_(x, Branch(branch, gate))
