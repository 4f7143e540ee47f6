"""8-bit integers with one scale per row, rotated in groups (ConvRot): quantisation, and the product of two matrices.

    values = round(rotate(x) / scale),  scale = max(abs(rotate(x))) / 127 of each row

The rotation multiplies each group of 16, 64 or 256 numbers by an orthogonal matrix, which spreads a number that is
larger than the others over its group, so that the scale of the row is not that of one number. The product of two
rotated matrices is that of the matrices.
"""

from __future__ import annotations

import functools

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.implementation import DTYPES, has_shape_alone, runs_in_triton
from diffusion_runtime.kernels.int8_rows import reference, triton
from diffusion_runtime.startup.importing import import_failure

# Numbers per row that products take: multiples of this.
ALIGNMENT = 16


def quantize_rows(
    x: torch.Tensor,
    group_size: int,
    *,
    gelu_from: int | None = None,
    features: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> QuantizedRows:
    """x [..., dim] quantised by row: values int8 [rows, dim], scales float32 [rows, 1], both contiguous.

    group_size: of the rotation, 0 for none. gelu_from: the columns from there on go through GELU, in its tanh form.
    features: like x, for silu(x) * features. first: [..., other dim], put before all that. All of it is one pass.
    Raises ConfigError for shapes that do not fit, and rows that are no whole groups.
    """
    rows = x.reshape(-1, x.shape[-1])
    others, before = (None if each is None else each.reshape(-1, each.shape[-1]) for each in (features, first))
    made = triton.repeat(rows, group_size, gelu_from, others, before)
    if made is not None:
        return made
    dim = rows.shape[1] + (0 if before is None else before.shape[1])
    if features is not None and features.shape != x.shape:
        raise ConfigError(f"int8 rows: expected features {tuple(x.shape)}, got {tuple(features.shape)}")
    if first is not None and first.shape[:-1] != x.shape[:-1]:
        raise ConfigError(f"int8 rows: expected first {(*x.shape[:-1], first.shape[-1])}, got {tuple(first.shape)}")
    if group_size and (group_size not in reference.GROUP_SIZES or dim % group_size):
        raise ConfigError(f"int8 rows: expected rows of whole groups of {group_size} numbers, got {dim}")
    if has_shape_alone(rows):
        return triton.empty_rows(rows, len(rows), dim)
    if runs_in_triton("auto", triton.refusal(rows, others, before)):
        return triton.quantize_rows(rows, group_size, gelu_from, others, before)
    activated = rows if others is None else silu_mul(rows, others)
    whole = activated if before is None else torch.cat([before, activated], dim=1)
    return reference.quantize_rows(whole, group_size, gelu_from=gelu_from)


def product_refusal(device: torch.device, dtype: torch.dtype, in_features: int) -> str | None:
    """Return why a device cannot multiply rows of 8-bit integers into results of `dtype`, or None."""
    if device.type == "meta":
        # Where memory is planned for a device that has them.
        return None
    if device.type == "cpu":
        return None if _has_vnni() else "this CPU has no products of 8-bit integers (VNNI)"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type} has no 8-bit integer products here"
    failure = import_failure("triton")
    if failure is not None:
        return f"8-bit integer products need Triton: {failure}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        return f"compute capability {major}.{minor}: products in Triton need 8.0 (Ampere) or newer"
    if dtype not in DTYPES:
        return f"products give bfloat16, float16 or float32, and the model's dtype is {dtype}"
    if in_features % ALIGNMENT:
        return f"products take rows of a multiple of {ALIGNMENT} numbers, got {in_features}"
    return None


def multiply_rows(
    x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """(x.values @ weight.values.T) * x.scales * weight.scales.T + bias, [rows, out_features] in `dtype`.

    weight: [out_features, in_features]; bias: [out_features]. Sums of products are exact; scales and bias are applied
    in float32, and the result is rounded once.
    """
    if has_shape_alone(x.values):
        return x.values.new_empty(len(x.values), len(weight.values), dtype=dtype)
    if runs_in_triton("auto", triton.product_refusal(x.values)):
        return triton.multiply_rows(x, weight, bias, dtype)
    if x.values.device.type != "cpu" or not _has_vnni():
        return reference.multiply_rows(x, weight, bias, dtype)
    sums = torch._int_mm(x.values, weight.values.t())
    return reference.scaled(sums, x.scales, weight.scales, bias, dtype)


@functools.cache
def _has_vnni() -> bool:
    """Return whether oneDNN multiplies 8-bit integers in one instruction, with exact sums: on one core with AMX, 1.4 to
    2.4 times as fast as dequantised weights at 512 to 1024 rows in float32 and bfloat16. Without it torch's own loop
    runs."""
    return bool(torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported())  # type: ignore[no-untyped-call]
