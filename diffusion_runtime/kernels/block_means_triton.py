"""The Triton kernel of block means. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def average_blocks(
    x,
    order,
    offsets,
    means,
    num_blocks,
    num_heads,
    order_stride,
    offsets_stride,
    stride_b,
    stride_n,
    stride_h,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """means [B * H, blocks, D], float32: the mean of each block's tokens of x [B, N, H, D], 0 for an empty block.

    Grid: (B * H, blocks): programs that run together read the heads of the same tokens, which are neighbours in memory.
    One program adds up one block in order, so every run gives the same bits.
    """
    block = tl.program_id(1)
    head = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + head * offsets_stride + block)
    stop = tl.load(offsets + head * offsets_stride + block + 1)
    columns = tl.arange(0, W)
    rows = x + head // num_heads * stride_b + head % num_heads * stride_h
    total = tl.zeros([W], tl.float32)
    position = start
    # Not range(): its bounds are read on the device, which Triton 3.6's interpreter cannot do with NumPy 2.4.
    while position < stop:
        places = position + tl.arange(0, BLOCK)
        inside = places < stop
        tokens = tl.load(order + head * order_stride + places, mask=inside, other=0).to(tl.int64)
        values = tl.load(
            rows + tokens[:, None] * stride_n + columns[None, :],
            mask=inside[:, None] & (columns < D)[None, :],
            other=0.0,
        )
        total += tl.sum(values.to(tl.float32), axis=0)
        position += BLOCK
    mean = total / tl.maximum(stop - start, 1).to(tl.float32)
    tl.store(means + (head * num_blocks + block) * D + columns, mean, mask=columns < D)
