"""The specification of norm and SiLU, in torch: what diffusers' modules compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_HALF = (torch.float16, torch.bfloat16)


def rms_norm_silu(x: torch.Tensor, gamma: torch.Tensor, scale: float) -> torch.Tensor:
    """As in api.py."""
    normalized = F.normalize(x.float() if x.dtype in _HALF else x, dim=1).to(x.dtype)
    # The sum turns -0 into 0, as the norm's absent bias does in diffusers.
    return F.silu(normalized * scale * gamma.view(-1, 1, 1, 1) + 0.0)


def pixel_norm_silu(x: torch.Tensor, eps: float) -> torch.Tensor:
    """As in api.py."""
    return F.silu(x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + eps))


def group_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """As in api.py."""
    return F.silu(F.group_norm(x, num_groups, weight, bias, eps))
