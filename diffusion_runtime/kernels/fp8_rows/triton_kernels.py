"""The Triton kernel of row-wise quantisation. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


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
):
    """values [rows, dim] float8_e4m3fn and scales [rows] float32 of x [rows, dim]; GELU: with the tanh GELU of
    the columns from gelu_from on; GATED: of silu(x) * features; JOINED: of that behind the num_first columns of first,
    dim in all. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    places = columns
    in_x = inside
    if JOINED:
        places = columns - num_first
        in_x = inside & (columns >= num_first)
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
    largest = tl.maximum(tl.max(tl.abs(numbers), axis=0), 1e-12)
    # One division per row, not per number: at most 448.00003, which the conversion rounds to 448.
    numbers *= tl.div_rn(448.0, largest)
    tl.store(values + row * dim + columns, numbers.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, tl.div_rn(largest, 448.0))
