"""Rotated 8-bit integers in Triton: one read of a row and one write of a byte per number; products with both scales in
the epilogue."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.fp8_rows.triton import launch_of_rows, num_first, pointers_of
from diffusion_runtime.kernels.implementation import is_interpreted, may_run_on, refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

# Of one program, which keeps its row in registers.
MAX_DIM = 32768
_launches, _products = LaunchCache(), LaunchCache()
# Rows and columns of the result and numbers of a row per step, by the shared memory of a chip: Hopper's, and others'.
# 128 columns beat 256 there by 1.14x to 1.28x in every product of benchmarks/int8_gpu.py (one H200).
_TILES = {True: (128, 128, 128), False: (128, 128, 64)}
_INTERPRETED_TILE = (16, 32, 32)
# Tiles of rows that pass the same columns of the weight together, which then stay in the cache.
_ROWS_TOGETHER = 8


def refusal(x: torch.Tensor, features: torch.Tensor | None = None, first: torch.Tensor | None = None) -> str | None:
    """Return why this implementation cannot quantise tensors like x, or None."""
    reason = refusal_of(x, features, first)
    if reason is not None:
        return reason
    dim = x.shape[-1] + num_first(first)
    if not 0 < dim <= MAX_DIM:
        return f"takes rows of 1 to {MAX_DIM} numbers, not {dim}"
    return None


def quantize_rows(
    x: torch.Tensor,
    group_size: int,
    gelu_from: int | None = None,
    features: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> QuantizedRows:
    """Quantise x [rows, dim] as in api.py. gelu_from: a column of first and x together."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = _empty_rows_of(x, first)
    if not len(x):
        return rows

    def prepare() -> Launch:
        from diffusion_runtime.kernels.int8_rows import triton_kernels as kernels

        more = {"GROUP": max(1, group_size)}
        return launch_of_rows(kernels.quantize_rows, x, gelu_from, features, first, more)

    _launches.run(_key(x, group_size, gelu_from, features, first), pointers_of(x, features, first, rows), prepare)
    return rows


def repeat(
    x: torch.Tensor,
    group_size: int,
    gelu_from: int | None,
    features: torch.Tensor | None,
    first: torch.Tensor | None,
) -> QuantizedRows | None:
    """Return the result of a call like an earlier one, without its checks, or None for the first of its kind."""
    found = _launches.repeat(x.device, _key, x, group_size, gelu_from, features, first)
    if found is None:
        return None
    rows = _empty_rows_of(x, first)
    found.run(pointers_of(x, features, first, rows))
    return rows


def empty_rows(x: torch.Tensor, num_rows: int, dim: int) -> QuantizedRows:
    """Return an empty QuantizedRows on x's device."""
    values = x.new_empty((num_rows, dim), dtype=torch.int8)
    return QuantizedRows(values, x.new_empty((num_rows, 1), dtype=torch.float32))


def product_refusal(values: torch.Tensor) -> str | None:
    """Return why this implementation cannot multiply rows like these, or None."""
    return None if may_run_on(values.device) else "needs a CUDA GPU"


def multiply_rows(
    x: QuantizedRows, weight: QuantizedRows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Compute as in api.py."""
    (num_rows, depth), num_out = x.values.shape, len(weight.values)
    out = x.values.new_empty((num_rows, num_out), dtype=dtype)
    if not out.numel():
        return out
    pointers = (x.values, weight.values, x.scales, weight.scales, weight.scales if bias is None else bias, out)

    def prepare() -> Launch:
        from diffusion_runtime.kernels.int8_rows import triton_kernels as kernels

        rows, columns, step = _tile(x.values.device)
        constants = {
            "BIAS": bias is not None,
            "EVEN": depth % step == 0,
            "ROWS": rows,
            "COLUMNS": columns,
            "STEP": step,
            "TOGETHER": _ROWS_TOGETHER,
        }
        grid = (-(-num_rows // rows) * -(-num_out // columns), 1, 1)
        return Launch(kernels.multiply_rows, grid, (num_rows, num_out, depth), constants, 8)

    _products.run((tuple(map(kind_of, pointers)), bias is None), pointers, prepare)
    return out


def _tile(device: torch.device) -> tuple[int, int, int]:
    if is_interpreted and device.type == "cpu":
        return _INTERPRETED_TILE
    return _TILES[torch.cuda.get_device_capability(device)[0] in (9, 10)]


def _empty_rows_of(x: torch.Tensor, first: torch.Tensor | None) -> QuantizedRows:
    num_rows, dim = x.shape
    return empty_rows(x, num_rows, dim + num_first(first))


def _key(
    x: torch.Tensor,
    group_size: int,
    gelu_from: int | None,
    features: torch.Tensor | None,
    first: torch.Tensor | None,
) -> Hashable:
    """Return all that checks and launch depend on."""
    return kind_of(x), group_size, gelu_from, kind_of(features), kind_of(first)
