"""The specification of the activations, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate: torch.Tensor, features: torch.Tensor, in_place: bool) -> torch.Tensor:
    """As in api.py."""
    return F.silu(gate, inplace=in_place).mul_(features)


def gelu_(x: torch.Tensor) -> torch.Tensor:
    """As in api.py."""
    result: torch.Tensor = torch.ops.aten.gelu_(x, approximate="tanh")
    return result
