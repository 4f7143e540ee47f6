"""The specification of row-wise quantisation, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

FP8_MAX = 448.0  # Of float8_e4m3fn.
SMALLEST_MAXIMUM = 1e-12  # Of a row, so that a row of zeros has a scale.


class QuantizedRows(NamedTuple):
    """values: float8_e4m3fn [rows, dim]; scales: float32 [rows, 1]. The tensor is values * scales."""

    values: torch.Tensor
    scales: torch.Tensor


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """x: [rows, dim]."""
    values = x.float()
    scales = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAXIMUM) / FP8_MAX
    return QuantizedRows((values / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales)


def dequantize(rows: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
    """[rows, dim], multiplied in float32 and rounded once."""
    return (rows.values.float() * rows.scales).to(dtype)
