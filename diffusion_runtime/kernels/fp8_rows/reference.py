"""The specification of row-wise quantisation, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

FP8_MAX = 448.0  # Of float8_e4m3fn.
SMALLEST_MAXIMUM = 1e-12  # Of a row, so that a row of zeros has a scale.


class QuantizedRows(NamedTuple):
    """values: float8_e4m3fn [rows, dim]; scales: float32 [rows, 1]. The tensor is values * scales."""

    values: torch.Tensor
    scales: torch.Tensor


def quantize_rows(x: torch.Tensor, *, gelu_from: int | None = None) -> QuantizedRows:
    """x: [rows, dim]; gelu_from: as in api.py, computed in float32 and not rounded before."""
    values = x.float()
    if gelu_from is not None:
        activated = F.gelu(values[:, gelu_from:], approximate="tanh")
        values = torch.cat([values[:, :gelu_from], activated], dim=1)
    largest = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAXIMUM)
    # A tensor over a tensor is divided; a number over a tensor would be multiplied by the rounded reciprocal.
    factors = torch.full_like(largest, FP8_MAX) / largest
    return QuantizedRows((values * factors).to(torch.float8_e4m3fn), largest / FP8_MAX)


def dequantize(rows: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
    """[rows, dim], multiplied in float32 and rounded once."""
    return (rows.values.float() * rows.scales).to(dtype)
