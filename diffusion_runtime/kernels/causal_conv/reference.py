"""The specification of a causal convolution's input, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class NormSilu:
    """RMSNorm over the channels, then SiLU. gamma: [channels]. scale: the square root of their number."""

    gamma: torch.Tensor
    scale: float


def channels_first_input(x: torch.Tensor, history: torch.Tensor, norm: NormSilu | None, padding: int) -> torch.Tensor:
    """Implement api.channels_first_input in torch."""
    if norm is not None:
        gamma = norm.gamma.view(-1, 1, 1, 1)
        normalized = F.normalize(x.float() if x.dtype in _HALF else x, dim=1).to(x.dtype)
        # The sum turns -0 into 0, as the norm's absent bias does in diffusers.
        x = F.silu(normalized * norm.scale * gamma + 0.0)
    window = torch.cat([history, x], dim=2)
    history.copy_(window[:, :, -2:])
    return F.pad(window, (padding,) * 4)


def add_bias_residual(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """Implement api.add_bias_residual in torch."""
    if bias is not None:
        x.add_(bias.view(-1, 1, 1, 1))
    return x.add_(residual)


def channels_last_input(
    x: torch.Tensor,
    history: torch.Tensor,
    norm: NormSilu | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    is_first: bool,
) -> torch.Tensor:
    """Implement api.channels_last_input in torch."""
    value = x if bias is None else x + bias
    if residual is not None:
        value = x.copy_(value + residual)
    if norm is not None:
        normalized = F.normalize(value.float() if x.dtype in _HALF else value, dim=3).to(x.dtype)
        value = F.silu(normalized * norm.scale * norm.gamma)
    if is_first:
        history.zero_()
    window = torch.cat([history, value])
    history.copy_(window[-2:])
    return window[2:] if is_first else window
