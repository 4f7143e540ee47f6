"""The specification of rotated 8-bit integers, in torch."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from diffusion_runtime.kernels.fp8_rows.reference import SMALLEST_MAXIMUM, QuantizedRows

INT8_MAX = 127
# Powers of 4, as the matrix is a power of one of 4 x 4.
GROUP_SIZES = (16, 64, 256)
_H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


def group_size_of(dim: int) -> int:
    """Return the largest size of groups that rows of `dim` numbers are whole ones of; 0 for none."""
    return max((size for size in GROUP_SIZES if dim % size == 0), default=0)


def hadamard(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the orthogonal and symmetric [size, size]: H4 (x) H4 (x) ... over the root of the size. Of 256 KiB, copied
    per call: from pinned memory, which a CUDA graph can hold."""
    is_pinned = device.type == "cuda"
    return _hadamard(size, is_pinned).to(device, dtype, non_blocking=is_pinned)


@functools.cache
def _hadamard(size: int, is_pinned: bool) -> torch.Tensor:
    with torch.inference_mode(False):
        of_four = matrix = torch.tensor(_H4, dtype=torch.float32, device="cpu")
        while len(matrix) < size:
            matrix = torch.kron(matrix, of_four)
        # A power of two, exact in every dtype.
        normalised: torch.Tensor = matrix / size**0.5
        return normalised.pin_memory() if is_pinned else normalised


def rotate(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return x [..., dim], each group of whose numbers is multiplied by `hadamard`, in x's dtype; twice gives x again.
    group_size: 0 for none."""
    if not group_size:
        return x
    groups = x.reshape(-1, group_size) @ hadamard(group_size, x.device, x.dtype)
    return groups.view(x.shape)


def quantize_rows(x: torch.Tensor, group_size: int, *, gelu_from: int | None = None) -> QuantizedRows:
    """Quantise x [rows, dim] as in api.py. gelu_from: of the tanh GELU, computed in float32 and not rounded before."""
    values = x.float()
    if gelu_from is not None:
        activated = F.gelu(values[:, gelu_from:], approximate="tanh")
        values = torch.cat([values[:, :gelu_from], activated], dim=1)
    rotated = rotate(values, group_size)
    largest = rotated.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAXIMUM)
    # A tensor over a tensor is divided; a number over a tensor would be multiplied by the rounded reciprocal.
    factors = torch.full_like(largest, INT8_MAX) / largest
    values = (rotated * factors).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return QuantizedRows(values, largest / INT8_MAX)


def dequantize(rows: QuantizedRows, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [rows, dim], multiplied and rotated in float32 and rounded once."""
    return rotate(rows.values.float() * rows.scales, group_size).to(dtype)


def multiply_rows(
    x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Compute as in api.py. Sums are exact, as of 32-bit integers."""
    sums = x.values.double() @ weight.values.double().t()
    return scaled(sums, x.scales, weight.scales, bias, dtype)


def scaled(
    sums: torch.Tensor, scales: torch.Tensor, of_weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return a product of its sums [rows, out_features] in `dtype`. scales, of_weight: of the rows of either matrix."""
    product = sums.float().mul_(scales).mul_(of_weight.view(1, -1))
    return (product if bias is None else product.add_(bias.float())).to(dtype)
