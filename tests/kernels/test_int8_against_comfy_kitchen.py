"""int8 ConvRot against the eager functions of comfy-kitchen, where that package is installed."""

from __future__ import annotations

import pytest
import torch

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.int8_rows.reference import GROUP_SIZES, dequantize, multiply_rows, quantize_rows

eager = pytest.importorskip("comfy_kitchen.backends.eager.quantization", reason="comfy-kitchen is not installed")


def test_numbers_and_products_are_those_of_comfy_kitchen() -> None:
    """Weights that it quantised give the same numbers, and products differ by the rounding of the inputs alone."""
    torch.manual_seed(0)
    for group_size in GROUP_SIZES:
        weight, x = torch.randn(96, 512), torch.randn(7, 512)
        values, scale = eager.quantize_int8_convrot_weight(weight, group_size)
        scales = scale.float().reshape(-1, 1).expand(96, 1)
        ours = dequantize(QuantizedRows(values, scales), group_size, torch.float32)
        theirs = eager.dequantize_int8_convrot_weight(values, scale, group_size).float()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        product = multiply_rows(quantize_rows(x, group_size), QuantizedRows(values, scales), None, torch.float32)
        expected = eager.int8_linear(
            x, values, scale, out_dtype=torch.float32, convrot=True, convrot_groupsize=group_size
        )
        assert float((product - expected).norm() / expected.norm()) < 2e-3, group_size
