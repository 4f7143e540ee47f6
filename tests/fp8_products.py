"""Products of 8-bit rows on machines that have none."""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows, dequantize


def dequantized_product(x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product of the same numbers, in bfloat16."""
    return torch.nn.functional.linear(*(dequantize(rows, torch.bfloat16) for rows in (x, weight)), bias)
