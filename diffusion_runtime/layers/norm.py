"""RMSNorm and LayerNorm with float32 statistics."""

from __future__ import annotations

import torch
from torch import nn

from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, modulated_norm
from diffusion_runtime.kernels.modulated_norm.reference import rms_norm
from diffusion_runtime.layers.weight_share import WeightShare


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    share: which of its features this process holds where several share them (tensor parallel), None for all; the mean
    is over those of all, so that only layers/rope.py computes such a norm.
    """

    share: WeightShare | None = None

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]. A float32 `x` is overwritten and returned; another dtype gives a new tensor."""
        assert self.share is None, "a norm over features that processes share takes their squares from all of them"
        return rms_norm(x, self.weight, self.eps)

    @property
    def as_norm(self) -> Norm:
        """Form of the norm for a kernel that fuses it with its neighbours."""
        assert self.share is None
        return Norm("rms", self.eps, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Layer norm with weight and bias, in float32 whatever the dtype of its input (Ba et al., arXiv:1607.06450)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor, branch: Branch | None = None) -> torch.Tensor:
        """x: [..., dim]; a new tensor of x's dtype. The weights are float32 in a model of any dtype.

        branch: added to x [batch, seq, dim] first, in place.
        """
        if x.dim() == 3:
            return modulated_norm(x, self.as_norm, branch=branch)
        return modulated_norm(x.reshape(1, -1, x.shape[-1]), self.as_norm).view(x.shape)

    @property
    def as_norm(self) -> Norm:
        return Norm("layer", self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
