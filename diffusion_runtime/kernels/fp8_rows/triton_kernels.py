"""The Triton kernels of row-wise quantisation. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _read_numbers(
    x,
    features,
    first,
    row,
    start,
    dim,
    num_first,
    stride,
    features_stride,
    first_stride,
    gelu_from,
    GELU: tl.constexpr,
    GATED: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read the BLOCK numbers of a row from column `start` on, float32, 0 behind the last. GELU: with the tanh GELU of
    the columns from gelu_from on; GATED: of silu(x) * features; JOINED: of that behind the num_first columns of first,
    dim in all."""
    columns = start + tl.arange(0, BLOCK)
    places = columns
    in_x = columns < dim
    if JOINED:
        places = columns - num_first
        in_x = in_x & (columns >= num_first)
    numbers = tl.load(x + row * stride + places, mask=in_x, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 * (1 + tanh(u)) is the logistic function of 2 u.
        weights = tl.sigmoid(1.5957691216057308 * (numbers + 0.044715 * numbers * numbers * numbers))
        numbers = tl.where(columns >= gelu_from, numbers * weights, numbers)
    if GATED:
        numbers *= tl.sigmoid(numbers)
        numbers *= tl.load(features + row * features_stride + places, mask=in_x, other=0.0).to(tl.float32)
        # As a pass of its own would read it: one pass and two give equal numbers.
        numbers = numbers.to(x.dtype.element_ty).to(tl.float32)
    if JOINED:
        before = tl.load(first + row * first_stride + columns, mask=columns < num_first, other=0.0).to(tl.float32)
        numbers = tl.where(columns < num_first, before, numbers)
    return numbers


@triton.jit
def quantize_rows(
    x,
    features,
    first,
    values,
    scales,
    dim,
    num_first,
    stride,
    features_stride,
    first_stride,
    gelu_from,
    GELU: tl.constexpr,
    GATED: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """values [rows, dim] float8_e4m3fn and scales [rows] float32 of what _read_numbers reads. The first BLOCK of
    a row's numbers and the REST behind them, which may be none, are kept in registers. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    numbers = _read_numbers(
        x,
        features,
        first,
        row,
        0,
        dim,
        num_first,
        stride,
        features_stride,
        first_stride,
        gelu_from,
        GELU,
        GATED,
        JOINED,
        BLOCK,
    )
    largest = tl.maximum(tl.max(tl.abs(numbers), axis=0), 1e-12)
    if REST:
        others = _read_numbers(
            x,
            features,
            first,
            row,
            BLOCK,
            dim,
            num_first,
            stride,
            features_stride,
            first_stride,
            gelu_from,
            GELU,
            GATED,
            JOINED,
            REST,
        )
        largest = tl.maximum(largest, tl.max(tl.abs(others), axis=0))
    # One division per row, not per number: at most 448.00003, which the conversion rounds to 448.
    factor = tl.div_rn(448.0, largest)
    columns = tl.arange(0, BLOCK)
    tl.store(values + row * dim + columns, (numbers * factor).to(tl.float8e4nv), mask=columns < dim)
    if REST:
        columns = BLOCK + tl.arange(0, REST)
        tl.store(values + row * dim + columns, (others * factor).to(tl.float8e4nv), mask=columns < dim)
    tl.store(scales + row, tl.div_rn(largest, 448.0))
