"""The specification of reading keys and values in 8 bits, in torch."""

from __future__ import annotations

import torch


def dequantise(
    keys: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in api.py."""
    k, v = (codes.view(torch.float8_e4m3fn).to(scale.dtype) for codes in (keys, values))
    return torch.addcmul(mean, k, scale[0]), v.mul_(scale[1])
