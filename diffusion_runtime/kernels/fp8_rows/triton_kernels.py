"""The Triton kernel of row-wise quantisation. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_rows(x, values, scales, dim, stride, BLOCK: tl.constexpr):
    """values [rows, dim] float8_e4m3fn and scales [rows] float32 of x [rows, dim]. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < dim
    numbers = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(numbers), axis=0), 1e-12), 448.0)
    # As the reference divides: a product with the reciprocal would round some numbers to the neighbour.
    quotients = tl.div_rn(numbers, tl.zeros([BLOCK], tl.float32) + scale)
    # Comparisons drop NaN, which has to show in the result.
    clamped = tl.where(quotients == quotients, tl.minimum(tl.maximum(quotients, -448.0), 448.0), quotients)
    tl.store(values + row * dim + columns, clamped.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)
