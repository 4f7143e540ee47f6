"""The Triton kernels of packing. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pack_run(
    source,
    packed,
    means,
    order,
    offsets,
    text_lengths,
    run,
    head,
    batch,
    num_heads,
    num_rows,
    num_grid,
    num_blocks,
    order_stride,
    offsets_stride,
    stride_b,
    stride_n,
    stride_h,
    D: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    AVERAGE: tl.constexpr,
):
    """Pack one run of one head: a block, or RUN rows of text; without BY_BLOCKS, RUN rows of anything."""
    columns = tl.arange(0, W)
    row = head.to(tl.int64)
    if (run == 0) & (head == batch * num_heads - 1):
        tail = packed + (row + 1) * num_rows * W
        zeros = tl.zeros([TAIL, W], packed.dtype.element_ty)
        tl.store(tail + tl.arange(0, TAIL)[:, None] * W + columns[None, :], zeros)
    b = head // num_heads
    readable = num_rows
    if HAS_LENGTHS:
        readable = num_grid + tl.load(text_lengths + b)
    position = run * RUN
    stop = tl.minimum(position + RUN, num_rows)
    if BY_BLOCKS:
        if run < num_blocks:
            bounds = offsets + row * offsets_stride + run
            position = tl.load(bounds)
            stop = tl.load(bounds + 1)
        else:
            position = num_grid + (run - num_blocks) * RUN
            stop = tl.minimum(position + RUN, num_rows)
    length = stop - position
    rows = source + b.to(tl.int64) * stride_b + (head % num_heads).to(tl.int64) * stride_h
    target = packed + row * num_rows * W
    total = tl.zeros([W], tl.float32)
    # Not range(): its bounds are read on the device, which Triton 3.6's interpreter cannot do with NumPy 2.4.
    while position < stop:
        places = position + tl.arange(0, RUN)
        inside = places < stop
        tokens = tl.load(order + row * order_stride + places, mask=inside, other=0).to(tl.int64)
        values = tl.load(
            rows + tokens[:, None] * stride_n + columns[None, :],
            mask=(inside & (places < readable))[:, None] & (columns < D)[None, :],
            other=0.0,
        )
        tl.store(target + places.to(tl.int64)[:, None] * W + columns[None, :], values, mask=inside[:, None])
        if AVERAGE:
            total += tl.sum(values.to(tl.float32), axis=0)
        position += RUN
    if AVERAGE:
        if run < num_blocks:
            mean = total / tl.maximum(length, 1).to(tl.float32)
            tl.store(means + (row * num_blocks + run) * D + columns, mean, mask=columns < D)


@triton.jit
def pack_heads(
    q,
    k,
    v,
    q_packed,
    k_packed,
    v_packed,
    q_means,
    k_means,
    v_means,
    q_order,
    q_offsets,
    kv_order,
    kv_offsets,
    text_lengths,
    batch,
    num_heads,
    num_kv_heads,
    num_rows,
    num_grid,
    num_q_blocks,
    num_kv_blocks,
    q_order_stride,
    q_offsets_stride,
    kv_order_stride,
    kv_offsets_stride,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    D: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    AVERAGE_Q: tl.constexpr,
    AVERAGE_K: tl.constexpr,
    AVERAGE_V: tl.constexpr,
):
    """Rows of q, k and v in the order of their blocks, and the means of the blocks of some of them.

    Grid: (runs * heads of all three,): programs that run together read the heads of the same tokens, which are
    neighbours in memory. One program adds up one block in order, so every run gives the same bits.
    """
    q_heads = batch * num_heads
    kv_heads = batch * num_kv_heads
    run = tl.program_id(0) // (q_heads + 2 * kv_heads)
    head = tl.program_id(0) % (q_heads + 2 * kv_heads)
    # Three copies of the code, so that the compiler keeps what it knows of each pointer and stride.
    if head < q_heads:
        _pack_run(
            q,
            q_packed,
            q_means,
            q_order,
            q_offsets,
            text_lengths,
            run,
            head,
            batch,
            num_heads,
            num_rows,
            num_grid,
            num_q_blocks,
            q_order_stride,
            q_offsets_stride,
            q_b,
            q_n,
            q_h,
            D,
            W,
            RUN,
            TAIL,
            HAS_LENGTHS,
            BY_BLOCKS,
            AVERAGE_Q,
        )
    elif head < q_heads + kv_heads:
        _pack_run(
            k,
            k_packed,
            k_means,
            kv_order,
            kv_offsets,
            text_lengths,
            run,
            head - q_heads,
            batch,
            num_kv_heads,
            num_rows,
            num_grid,
            num_kv_blocks,
            kv_order_stride,
            kv_offsets_stride,
            k_b,
            k_n,
            k_h,
            D,
            W,
            RUN,
            TAIL,
            HAS_LENGTHS,
            BY_BLOCKS,
            AVERAGE_K,
        )
    else:
        _pack_run(
            v,
            v_packed,
            v_means,
            kv_order,
            kv_offsets,
            text_lengths,
            run,
            head - q_heads - kv_heads,
            batch,
            num_kv_heads,
            num_rows,
            num_grid,
            num_kv_blocks,
            kv_order_stride,
            kv_offsets_stride,
            v_b,
            v_n,
            v_h,
            D,
            W,
            RUN,
            TAIL,
            HAS_LENGTHS,
            BY_BLOCKS,
            AVERAGE_V,
        )


@triton.jit
def reorder_rows(
    source,
    order,
    moved,
    num_rows,
    num_heads,
    stride_b,
    stride_n,
    stride_h,
    moved_b,
    moved_n,
    moved_h,
    D: tl.constexpr,
    RUN: tl.constexpr,
):
    """moved[b, position, h] = source[b, order[position], h]. Grid: (rows / RUN, B * H)."""
    positions = tl.program_id(0) * RUN + tl.arange(0, RUN)
    b = (tl.program_id(1) // num_heads).to(tl.int64)
    h = (tl.program_id(1) % num_heads).to(tl.int64)
    inside = positions < num_rows
    tokens = tl.load(order + positions, mask=inside, other=0).to(tl.int64)
    columns = tl.arange(0, D)
    rows = source + b * stride_b + h * stride_h
    values = tl.load(rows + tokens[:, None] * stride_n + columns[None, :], mask=inside[:, None], other=0.0)
    target = moved + b * moved_b + h * moved_h + positions.to(tl.int64)[:, None] * moved_n
    tl.store(target + columns[None, :], values, mask=inside[:, None])
