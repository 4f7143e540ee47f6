"""8-bit floats with one scale per row: quantisation, and the product of two such matrices.

    values = round(x / scale),  scale = max(abs(x)) / 448 of each row

448 is the largest number of float8_e4m3fn, which has 3 bits of mantissa: a value is off by at most 1/16 of itself, and
3.6 % in the root mean square of a product of normal numbers (Micikevicius et al., arXiv:2209.05433).
"""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_rows import reference, triton
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows as QuantizedRows
from diffusion_runtime.kernels.implementation import has_shape_alone, runs_in_triton

# Numbers per row and rows that the product of torch takes: multiples of this.
ALIGNMENT = 16


def quantize_rows(x: torch.Tensor, *, gelu_from: int | None = None) -> QuantizedRows:
    """x [..., dim] quantised by row: values float8_e4m3fn [rows, dim], scales float32 [rows, 1], both contiguous.

    gelu_from: the columns from there on go through GELU, in its tanh form, in the same pass; None for no GELU. rows:
    the product of the leading dimensions. Infinite and NaN numbers stay NaN. Raises ConfigError for a tensor without
    dimensions.
    """
    if x.ndim < 1:
        raise ConfigError("quantize_rows: expected [..., dim], got a single number")
    rows = x.reshape(-1, x.shape[-1])
    if has_shape_alone(rows):
        values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
        return QuantizedRows(values, rows.new_empty(len(rows), 1, dtype=torch.float32))
    if runs_in_triton("auto", triton.refusal(rows)):
        return triton.quantize_rows(rows, gelu_from=gelu_from)
    return reference.quantize_rows(rows, gelu_from=gelu_from)


def product_refusal(device: torch.device, dtype: torch.dtype, in_features: int, out_features: int) -> str | None:
    """Why a device cannot multiply 8-bit rows into results of `dtype`; None when it can."""
    if device.type == "meta":
        # Where memory is planned for a device that has them.
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} has no 8-bit float products here"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"compute capability {major}.{minor} has none; 8.9 (Ada) and newer have"
    if dtype != torch.bfloat16:
        return f"torch's row-wise product gives bfloat16, and the model's dtype is {str(dtype).removeprefix('torch.')}"
    if in_features % ALIGNMENT or out_features % ALIGNMENT:
        return f"it takes sizes that are multiples of {ALIGNMENT}, got {in_features} x {out_features}"
    return None


def multiply_rows(x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
    """(x.values * x.scales) @ (weight.values * weight.scales).T + bias, bfloat16 [rows, out_features].

    weight: [out_features, in_features]; bias: bfloat16 [out_features]. On a device without `product_refusal`. Sums are
    rounded to 14 bits now and then on Hopper (fast accumulation), which is below the error of the 8-bit inputs.
    """
    if has_shape_alone(x.values):
        return x.values.new_empty(len(x.values), len(weight.values), dtype=torch.bfloat16)
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales,
        scale_b=weight.scales.view(1, -1),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
