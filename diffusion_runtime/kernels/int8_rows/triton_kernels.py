"""Triton kernels of rotated 8-bit integers. Importing this file needs Triton."""

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
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values [rows, dim] int8 and scales [rows] float32 of x [rows, dim], rotated in groups of GROUP numbers, 1 for no
    rotation; GELU: with the tanh GELU of the columns from gelu_from on; GATED: of silu(x) * features; JOINED: of that
    behind the num_first columns of first, dim in all. Grid: (rows,)."""
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
    targets = columns
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
        # Likewise of every four runs of 4, 16 and 64 numbers; their order is turned round where they are stored.
        numbers = _rotate_runs(numbers, 4, GROUP, BLOCK)
        numbers = _rotate_runs(numbers, 16, GROUP, BLOCK)
        numbers = _rotate_runs(numbers, 64, GROUP, BLOCK)
        root: tl.constexpr = 4 if GROUP == 16 else 8 if GROUP == 64 else 16
        numbers *= 1.0 / root
        targets = tl.max_contiguous(tl.multiple_of(columns ^ (GROUP - 4), 4), 4)
    # NaN is lost in a maximum and an integer: the scale of its row is infinite.
    sizes = tl.where(numbers != numbers, float("inf"), tl.abs(numbers))
    largest = tl.maximum(tl.max(sizes, axis=0), 1e-12)
    # One division per row, not per number.
    numbers *= tl.div_rn(127.0, largest)
    # Ties to even: at most 127.00001, which adding and taking off 1.5 * 2 ** 23 rounds to 127.
    rounded = (numbers + 12582912.0) - 12582912.0
    tl.store(values + row * dim + targets, rounded.to(tl.int8), mask=inside)
    tl.store(scales + row, tl.div_rn(largest, 127.0))


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
