"""Adaptive layer norm: shift, scale and gate that come from the timestep (Peebles and Xie, arXiv:2212.09748)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def modulated_layer_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """layer_norm(x) * (1 + scale) + shift, in float32; a new tensor of x's dtype.

    x: [batch, seq, dim]; shift, scale: [batch, dim], float32.
    """
    scale = scale + 1.0
    if x.shape[0] == 1:
        # One sample: scale and shift are what a layer norm calls weight and bias, so one pass does it all.
        return F.layer_norm(x.float(), x.shape[-1:], scale[0], shift[0], eps).to(x.dtype)
    normalized = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return normalized.mul_(scale[:, None]).add_(shift[:, None]).to(x.dtype)


def add_gated_(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + branch * gate, written into x.

    x, branch: [batch, seq, dim] of one dtype; gate: [batch, dim], float32. Summed in float32, rounded once.
    """
    return x.addcmul_(branch, gate[:, None])
