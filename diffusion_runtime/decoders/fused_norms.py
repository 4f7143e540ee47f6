"""Norm and SiLU of a third-party video autoencoder in one pass: a copy of its network around the same weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.kernels.norm_silu.api import group_norm_silu, pixel_norm_silu, rms_norm_silu

# Names of a norm in diffusers' blocks, and of the activation that follows it.
_PAIRS = (
    ("norm1", "nonlinearity"),
    ("norm2", "nonlinearity"),
    ("norm_out", "nonlinearity"),
    ("norm_out", "conv_act"),
    ("conv_norm_out", "conv_act"),
)


class NormSilu(nn.Module):
    """SiLU(norm(x)). norm: group norm, RMSNorm over the channels as Wan and HunyuanVideo-1.5 have it, or LTX's pixel
    norm. is_exact: to the bits of norm then SiLU, where the kernel can."""

    def __init__(self, norm: nn.Module, *, is_exact: bool) -> None:
        super().__init__()
        self.norm = norm
        self._is_exact = is_exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return SiLU(norm(x)). x: [batch, channels, frames, height, width]."""
        norm: Any = self.norm
        if isinstance(norm, nn.GroupNorm):
            return group_norm_silu(x, norm.weight, norm.bias, norm.num_groups, norm.eps)
        if hasattr(norm, "gamma"):
            return rms_norm_silu(x, norm.gamma.flatten(), norm.scale, is_exact=self._is_exact)
        return pixel_norm_silu(x, norm.eps, is_exact=self._is_exact)


class LastTap(nn.Module):
    """A causal convolution of diffusers on a single frame: the frames before it are zeros, so only one tap of three
    needs computing, in two dimensions. Called as the module is called, without a history."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        """Convolve x [batch, channels, 1, height, width]."""
        assert cache_x is None, "a single frame has no history"
        conv: Any = self.conv
        left, _, above = conv._padding[:3]
        out: torch.Tensor = F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, padding=(above, left))
        return out[:, :, None]


def with_shared_weights(module: nn.Module) -> Any:
    """Return a copy whose parameters and buffers are the module's own tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def fuse_norms(network: nn.Module, *, is_exact: bool) -> int:
    """Replace every norm that a SiLU follows, in place; return how many. is_exact: as in NormSilu, which leaves group
    norms as they are."""
    replaced = 0
    for module in list(network.modules()):
        fused = False
        for norm_name, activation in _PAIRS:
            norm: Any = getattr(module, norm_name, None)
            follows = getattr(module, activation, None)
            if _can_fuse(norm, is_exact) and (fused or isinstance(follows, nn.SiLU)):
                setattr(module, norm_name, NormSilu(norm, is_exact=is_exact))
                setattr(module, activation, nn.Identity())
                fused, replaced = True, replaced + 1
    return replaced


def use_last_taps(network: nn.Module) -> None:
    """Replace the causal convolutions over three frames by their form on one frame, in place."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv3d) and child.kernel_size[0] == 3 and child.stride == (1, 1, 1):
                setattr(module, name, LastTap(child))


def _can_fuse(norm: Any, is_exact: bool) -> bool:
    if isinstance(norm, nn.GroupNorm):
        return not is_exact
    if isinstance(getattr(norm, "gamma", None), nn.Parameter):
        # The kernel does not know an RMSNorm with a bias.
        return bool(norm.gamma.dim() == 4) and isinstance(norm.bias, float)
    return type(norm).__name__ == "PerChannelRMSNorm" and norm.channel_dim == 1
