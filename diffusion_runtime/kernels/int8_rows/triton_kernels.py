"""Triton kernels of rotated 8-bit integers. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from diffusion_runtime.kernels.fp8_rows.triton_kernels import _read_numbers


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
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """values [rows, dim] int8 and scales [rows] float32 of what _read_numbers reads, rotated in groups of GROUP,
    1 for no rotation. The first BLOCK numbers of a row and the REST behind them, which may be none, are kept in
    registers. Grid: (rows,)."""
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
    numbers = _rotated(numbers, GROUP, BLOCK)
    largest = tl.maximum(_largest(numbers), 1e-12)
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
        others = _rotated(others, GROUP, REST)
        largest = tl.maximum(largest, _largest(others))
    # One division per row, not per number.
    factor = tl.div_rn(127.0, largest)
    _store(values + row * dim, numbers * factor, 0, dim, GROUP, BLOCK)
    if REST:
        _store(values + row * dim, others * factor, BLOCK, dim, GROUP, REST)
    tl.store(scales + row, tl.div_rn(largest, 127.0))


@triton.jit
def _largest(numbers):
    """NaN is lost in a maximum and an integer: the scale of its row is infinite."""
    return tl.max(tl.where(numbers != numbers, float("inf"), tl.abs(numbers)), axis=0)


@triton.jit
def _rotated(numbers, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Whole groups, rotated, whose order within the group `_store` turns round."""
    if GROUP > 1:
        # Row i of the matrix of 4 is the sum less twice number 3 - i: one thread holds all four.
        pairs = tl.reshape(numbers, (BLOCK // 4, 2, 2))
        even, odd = tl.split(pairs)
        first_of, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = (first_of + second) + (third + fourth)
        even = tl.join(total - 2 * fourth, total - 2 * second)
        odd = tl.join(total - 2 * third, total - 2 * first_of)
        numbers = tl.reshape(tl.join(even, odd), (BLOCK,))
        # Likewise of every four runs of 4, 16 and 64 numbers.
        numbers = _rotate_runs(numbers, 4, GROUP, BLOCK)
        numbers = _rotate_runs(numbers, 16, GROUP, BLOCK)
        numbers = _rotate_runs(numbers, 64, GROUP, BLOCK)
        root: tl.constexpr = 4 if GROUP == 16 else 8 if GROUP == 64 else 16
        numbers *= 1.0 / root
    return numbers


@triton.jit
def _store(values, numbers, start, dim, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Round numbers of at most 127.00001 and write them from column `start` on. Ties to even: adding and taking off
    1.5 * 2 ** 23 rounds to 127."""
    columns = start + tl.arange(0, BLOCK)
    targets = columns
    if GROUP > 1:
        targets = tl.max_contiguous(tl.multiple_of(columns ^ (GROUP - 4), 4), 4)
    rounded = (numbers + 12582912.0) - 12582912.0
    tl.store(values + targets, rounded.to(tl.int8), mask=columns < dim)


@triton.jit
def _rotate_runs(numbers, RUN: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Each four runs of RUN numbers become their sum less twice each, where a group has as many."""
    if RUN < GROUP:
        parts = tl.reshape(numbers, (BLOCK // (4 * RUN), 4, RUN))
        numbers = tl.reshape(tl.sum(parts, axis=1, keep_dims=True) - 2 * parts, (BLOCK,))
    return numbers


@triton.jit
def multiply_rows(
    x,
    weight,
    x_scales,
    weight_scales,
    bias,
    out,
    num_rows,
    num_out,
    depth,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """out [num_rows, num_out] of x [num_rows, depth] and weight [num_out, depth], int8, with a scale per row of either,
    float32, and bias [num_out]. EVEN: depth is a multiple of STEP. Grid: (tiles of ROWS x COLUMNS,)."""
    tile = tl.program_id(0)
    across = tl.cdiv(num_out, COLUMNS)
    # TOGETHER tiles of rows pass each tile of columns, then the next.
    band = tile // (TOGETHER * across)
    first = band * TOGETHER
    height = min(tl.cdiv(num_rows, ROWS) - first, TOGETHER)
    tile_row = first + (tile % (TOGETHER * across)) % height
    tile_column = (tile % (TOGETHER * across)) // height
    rows = tile_row * ROWS + tl.arange(0, ROWS)
    columns = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, STEP)
    # Rows behind the last are read as others, and not stored.
    of_x = x + (rows % num_rows).to(tl.int64)[:, None] * depth + steps[None, :]
    of_weight = weight + (columns % num_out).to(tl.int64)[None, :] * depth + steps[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for start in range(0, depth, STEP):
        if EVEN:
            left = tl.load(of_x)
            right = tl.load(of_weight)
        else:
            inside = start + steps < depth
            left = tl.load(of_x, mask=inside[None, :], other=0)
            right = tl.load(of_weight, mask=inside[:, None], other=0)
        sums = tl.dot(left, right, sums, out_dtype=tl.int32)
        of_x += STEP
        of_weight += STEP
    in_rows, in_columns = rows < num_rows, columns < num_out
    product = sums.to(tl.float32) * tl.load(x_scales + rows, mask=in_rows, other=0.0)[:, None]
    product *= tl.load(weight_scales + columns, mask=in_columns, other=0.0)[None, :]
    if BIAS:
        product += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    targets = out + rows.to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(targets, product.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
