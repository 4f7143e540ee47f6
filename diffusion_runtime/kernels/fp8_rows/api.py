"""8-bit floats with one scale per row: quantisation, and the product of two such matrices.

    values = round(x / scale),  scale = max(abs(x)) / 448 of each row

448 is the largest number of float8_e4m3fn, which has 3 bits of mantissa: a value is off by at most 1/16 of itself, and
3.6 % in the root mean square of a product of normal numbers (Micikevicius et al., arXiv:2209.05433).
"""

from __future__ import annotations

from typing import NoReturn

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.fp8_rows import reference, triton
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows as QuantizedRows
from diffusion_runtime.kernels.implementation import has_shape_alone, runs_in_triton

# Numbers per row and rows that the product of torch takes: multiples of this.
ALIGNMENT = 16
# Of the result, torch's only one.
PRODUCT_DTYPE = torch.bfloat16


def quantize_rows(x: torch.Tensor, *, gelu_from: int | None = None) -> QuantizedRows:
    """x [..., dim] quantised by row: values float8_e4m3fn [rows, dim], scales float32 [rows, 1], both contiguous.

    gelu_from: the columns from there on go through GELU, in its tanh form, in the same pass; None for no GELU. rows:
    the product of the leading dimensions. Infinite and NaN numbers stay NaN. Raises ConfigError for a tensor without
    dimensions.
    """
    if x.ndim < 1:
        raise ConfigError("quantize_rows: expected [..., dim], got a single number")
    rows = x.reshape(-1, x.shape[-1])
    made = triton.repeat(rows, gelu_from, None, None)
    if made is not None:
        return made
    if has_shape_alone(rows):
        return triton.empty_rows(rows, *rows.shape)
    if runs_in_triton("auto", triton.refusal(rows)):
        return triton.quantize_rows(rows, gelu_from=gelu_from)
    return reference.quantize_rows(rows, gelu_from=gelu_from)


def quantize_gated_rows(gate: torch.Tensor, features: torch.Tensor) -> QuantizedRows:
    """quantize_rows(silu(gate) * features) in one pass, and to the bit what silu_mul and quantize_rows give after each
    other. gate, features: [..., dim], such as the halves of one product. Raises ConfigError for shapes that differ."""
    return _quantize_parts(None, gate, features)


def quantize_joined_rows(
    first: torch.Tensor, second: torch.Tensor, features: torch.Tensor | None = None
) -> QuantizedRows:
    """quantize_rows of first [..., dim] and, next to it, the tanh GELU of second [..., other dim], or with features
    like second silu(second) * features: in one pass, without a copy of either, and with the bits of quantize_rows of
    both side by side. Raises ConfigError for shapes that do not fit."""
    return _quantize_parts(first, second, features)


def _quantize_parts(first: torch.Tensor | None, second: torch.Tensor, features: torch.Tensor | None) -> QuantizedRows:
    rows = second.reshape(-1, second.shape[-1])
    others, before = (None if x is None else x.reshape(-1, x.shape[-1]) for x in (features, first))
    num_first = 0 if before is None else before.shape[1]
    gelu_from = num_first if others is None else None
    made = triton.repeat(rows, gelu_from, others, before)
    if made is not None:
        return made
    if features is not None and features.shape != second.shape:
        _refuse("features", features, second.shape, second)
    if first is not None and first.shape[:-1] != second.shape[:-1]:
        _refuse("first", first, (*second.shape[:-1], num_first), second)
    if has_shape_alone(rows):
        return triton.empty_rows(rows, len(rows), num_first + rows.shape[1])
    if runs_in_triton("auto", triton.refusal(rows, others, before)):
        return triton.quantize_rows(rows, gelu_from=gelu_from, features=others, first=before)
    activated = rows if others is None else silu_mul(rows, others)
    whole = activated if before is None else torch.cat([before, activated], dim=1)
    return reference.quantize_rows(whole, gelu_from=gelu_from)


def _refuse(name: str, x: torch.Tensor, expected: tuple[int, ...], second: torch.Tensor) -> NoReturn:
    raise ConfigError(
        f"quantised rows: expected {name} {tuple(expected)} beside {tuple(second.shape)}, got {tuple(x.shape)}"
    )


def product_refusal(device: torch.device, dtype: torch.dtype, in_features: int, out_features: int) -> str | None:
    """Return why a device cannot multiply 8-bit rows into results of `dtype`, or None."""
    if device.type == "meta":
        # Where memory is planned for a device that has them.
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} has no 8-bit float products here"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"compute capability {major}.{minor} has none; 8.9 (Ada) and newer have"
    if dtype != PRODUCT_DTYPE:
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
        return x.values.new_empty(len(x.values), len(weight.values), dtype=PRODUCT_DTYPE)
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales,
        scale_b=weight.scales.view(1, -1),
        bias=bias,
        out_dtype=PRODUCT_DTYPE,
        use_fast_accum=True,
    )
