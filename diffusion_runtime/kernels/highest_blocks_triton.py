"""The Triton kernel of top-k. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_highest(scores, kept, num_scores, num_kept, BLOCK: tl.constexpr):
    """kept [rows, num_kept]: the indexes of the highest of scores [rows, num_scores], float32. Grid: (rows,).

    Floats become integers of the same order, and a bisection of 32 steps finds the lowest that is kept: the row is read
    once and stays in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_scores
    values = tl.load(scores + row * num_scores + columns, mask=inside, other=float("-inf"))
    values = tl.where(values == values, values, float("-inf"))
    # -0 and 0 are one number, and must be one key.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(inside, keys, -2147483648)
    low = tl.min(tl.where(inside, keys, 2147483647), 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64)
    for _ in tl.static_range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= num_kept
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    lowest = low.to(tl.int32)
    above = inside & (keys > lowest)
    level = inside & (keys == lowest)
    room = num_kept - tl.sum(above.to(tl.int32), 0)
    keep = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(kept + row * num_kept + place, columns, mask=keep)
