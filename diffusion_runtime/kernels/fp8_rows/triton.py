"""Row-wise quantisation in Triton: one read of the row, one write of a byte per number."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.implementation import refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

# Of one program, which keeps its row in registers.
MAX_DIM = 32768
_launches = LaunchCache()


def refusal(x: torch.Tensor, features: torch.Tensor | None = None, first: torch.Tensor | None = None) -> str | None:
    """Return why this implementation cannot quantise tensors like x, or None."""
    reason = refusal_of(x, features, first)
    if reason is not None:
        return reason
    if x.is_cuda and (torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (8, 9)):
        return "needs a GPU of NVIDIA's of compute capability 8.9 or newer"
    dim = x.shape[-1] + num_first(first)
    if not 0 < dim <= MAX_DIM:
        return f"takes rows of 1 to {MAX_DIM} numbers, not {dim}"
    return None


def quantize_rows(
    x: torch.Tensor,
    *,
    gelu_from: int | None = None,
    features: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> QuantizedRows:
    """x: [rows, dim]; with features [rows, dim], of silu(x) * features; behind first [rows, other dim], where given.
    gelu_from: a column of both together."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = _empty_rows_of(x, first)
    if not len(x):
        return rows

    def prepare() -> Launch:
        from diffusion_runtime.kernels.fp8_rows import triton_kernels as kernels

        return launch_of_rows(kernels.quantize_rows, x, gelu_from, features, first, {})

    _launches.run(_key(x, gelu_from, features, first), pointers_of(x, features, first, rows), prepare)
    return rows


def launch_of_rows(
    kernel: Any,
    x: torch.Tensor,
    gelu_from: int | None,
    features: torch.Tensor | None,
    first: torch.Tensor | None,
    more: Mapping[str, object],
) -> Launch:
    """Return the launch of a kernel that quantises rows, a program for each. more: its constants beside those of every
    such kernel; the others as in quantize_rows."""
    num_rows, dim = len(x), x.shape[1] + num_first(first)
    block, rest = parts_of(dim)
    strides = [0 if each is None else each.stride(0) for each in (x, features, first)]
    constants = {
        "GELU": gelu_from is not None,
        "GATED": features is not None,
        "JOINED": first is not None,
        **more,
        "BLOCK": block,
        "REST": rest,
    }
    numbers = (dim, num_first(first), *strides, gelu_from or 0)
    return Launch(kernel, (num_rows, 1, 1), numbers, constants, 4 if block <= 4096 else 8)


def parts_of(dim: int) -> tuple[int, int]:
    """Return the two powers of two that a row of `dim` numbers is kept in, the second 0 for none.

    Rows of more than 8192 numbers leave fewer threads without work so: 8960 as 8192 and 1024 are quantised in 0.59 of
    the time of 16384 in int8 (one H200, benchmarks/int8_gpu.py); shorter ones win nothing.
    """
    whole = 1 << (dim - 1).bit_length()
    block = whole // 2
    # Whole groups of a rotation in either part.
    rest = max(256, 1 << (dim - block - 1).bit_length())
    return (block, rest) if block >= 8192 and block + rest < whole else (whole, 0)


def repeat(
    x: torch.Tensor, gelu_from: int | None, features: torch.Tensor | None, first: torch.Tensor | None
) -> QuantizedRows | None:
    """Return the result of a call like an earlier one, without its checks, or None for the first of its kind."""
    found = _launches.repeat(x.device, _key, x, gelu_from, features, first)
    if found is None:
        return None
    rows = _empty_rows_of(x, first)
    found.run(pointers_of(x, features, first, rows))
    return rows


def empty_rows(x: torch.Tensor, num_rows: int, dim: int) -> QuantizedRows:
    """Return an empty QuantizedRows on x's device."""
    values = x.new_empty((num_rows, dim), dtype=torch.float8_e4m3fn)
    return QuantizedRows(values, x.new_empty((num_rows, 1), dtype=torch.float32))


def _empty_rows_of(x: torch.Tensor, first: torch.Tensor | None) -> QuantizedRows:
    num_rows, dim = x.shape
    return empty_rows(x, num_rows, dim + num_first(first))


def num_first(first: torch.Tensor | None) -> int:
    """Return how many numbers of a row are in front of those of x."""
    return 0 if first is None else first.shape[-1]


def pointers_of(
    x: torch.Tensor, features: torch.Tensor | None, first: torch.Tensor | None, rows: QuantizedRows
) -> tuple[torch.Tensor, ...]:
    """Return the pointers in the order of the kernel's arguments, x for each that it does not read."""
    return x, x if features is None else features, x if first is None else first, *rows


def _key(x: torch.Tensor, gelu_from: int | None, features: torch.Tensor | None, first: torch.Tensor | None) -> Hashable:
    """Return all that checks and launch depend on."""
    return kind_of(x), gelu_from, kind_of(features), kind_of(first)
