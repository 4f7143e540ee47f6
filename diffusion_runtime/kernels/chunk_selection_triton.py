"""The Triton kernel of chunk selection. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gates(
    q_rows,
    mean_rows,
    inside,
    num_chunks,
    row_starts,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """float32 [ROWS, CHUNKS]: q . mean. With SPLIT q is bfloat16, and each mean the sum of three bfloat16, which hold
    its 24 bits, so every product is exact. FACTOR: the type of their factors."""
    columns = tl.arange(0, CHUNKS)
    gates = tl.zeros([ROWS, CHUNKS], dtype=tl.float32)
    for first in range(0, D, DIMS):
        dims = first + tl.arange(0, DIMS)
        q = tl.load(q_rows + row_starts[:, None] + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0)
        mean = tl.load(
            mean_rows + columns[None, :] * D + dims[:, None],
            mask=(dims < D)[:, None] & (columns < num_chunks)[None, :],
            other=0.0,
        )
        if SPLIT:
            high = mean.to(tl.bfloat16)
            rest = mean - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            gates = tl.dot(q.to(FACTOR), low.to(FACTOR), gates, input_precision="ieee")
            gates = tl.dot(q.to(FACTOR), middle.to(FACTOR), gates, input_precision="ieee")
            gates = tl.dot(q.to(FACTOR), high.to(FACTOR), gates, input_precision="ieee")
        else:
            gates = tl.dot(q.to(tl.float32), mean, gates, input_precision="ieee")
    return gates


@triton.jit
def _ordered(values):
    """Floats as unsigned integers of the same order, 1 and more; a NaN comes highest, as it does in a sort."""
    # -0 and 0 are one number, and must be one key.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(values == values, bits, 0x7FFFFFFF)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return keys.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _bit(place):
    return tl.full([1], 1, tl.uint32) << place.to(tl.uint32)


@triton.jit
def _highest_foreign(gates, foreign, num_kept, ROWS: tl.constexpr):
    """bool [ROWS, CHUNKS]: the num_kept highest; the lowest index wins a tie.

    The lowest key that is kept is found bit by bit, from the highest on.
    """
    keys = tl.where(foreign, _ordered(gates), 0)
    lowest = tl.zeros([ROWS], tl.uint32)
    for step in range(32):
        tried = lowest | _bit(tl.zeros([1], tl.int32) + (31 - step))
        enough = tl.sum((keys >= tried[:, None]).to(tl.int32), 1) >= num_kept
        lowest = tl.where(enough, tried, lowest)
    above = foreign & (keys > lowest[:, None])
    level = foreign & (keys == lowest[:, None])
    room = num_kept - tl.sum(above.to(tl.int32), 1)
    return above | (level & (tl.cumsum(level.to(tl.int32), 1) <= room[:, None]))


@triton.jit
def _foreign_by_share(gates, own, foreign, THRESHOLD: tl.constexpr, ROWS: tl.constexpr):
    """bool [ROWS, CHUNKS]: the highest that, with the own chunk, make up THRESHOLD; at least one.

    The key sought is the highest at which the heights from it on, itself included, reach what is missing. Every entry
    above it is kept, and of those at it as many as it takes. Sums are float64, as the reference's.
    """
    counted = own | foreign
    low = tl.min(tl.where(counted, gates, float("inf")), 1)
    high = tl.max(tl.where(counted, gates, float("-inf")), 1)
    broken = tl.max((counted & (gates != gates)).to(tl.int32), 1) > 0
    spread = high - low
    usable = (spread > 0) & ~broken
    height = tl.div_rn(gates - low[:, None], tl.where(usable, spread, 1.0)[:, None])
    height = tl.where(counted & usable[:, None], height, 0.0)
    total = tl.sum(height.to(tl.float64), 1) + 1e-6
    by_own = tl.sum(tl.where(own, height, 0.0).to(tl.float64), 1)
    share = THRESHOLD - by_own / total
    missing = tl.where(share > 0, share, 0.0) * total
    # Heights are 0 to 1, so their bits are in order; 0 marks what is not foreign.
    keys = tl.where(foreign, height.to(tl.int32, bitcast=True) + 1, 0)
    reached = tl.zeros([ROWS], tl.int32)
    for step in range(31):
        tried = reached | (tl.zeros([ROWS], tl.int32) + 1 << (30 - step))
        sums = tl.sum(tl.where(keys >= tried[:, None], height, 0.0).to(tl.float64), 1)
        reached = tl.where(sums >= missing, tried, reached)
    # Where nothing is missing no key is low enough, and the first of the highest is kept.
    highest = tl.max(keys, 1)
    level_key = tl.minimum(reached, highest)
    above = foreign & (keys > level_key[:, None])
    level = foreign & (keys == level_key[:, None])
    before = tl.sum(tl.where(above, height, 0.0).to(tl.float64), 1)
    rank = tl.cumsum(level.to(tl.int32), 1) - 1
    sums = before[:, None] + rank.to(tl.float64) * height.to(tl.float64)
    first = (level_key == highest)[:, None] & (rank == 0)
    return above | (level & ((sums < missing[:, None]) | first))


@triton.jit
def select_rows(
    q,
    means,
    order,
    chunk_of_row,
    row_mask,
    num_rows,
    num_chunks,
    num_heads,
    repeats,
    words,
    stride_b,
    stride_n,
    stride_h,
    num_foreign,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BY_SHARE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """row_mask [B * H, S, words]: the chunks that ROWS queries of a head select. Grid: (tiles of rows, B * H)."""
    head = tl.program_id(1)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    tokens = tl.load(order + rows, mask=inside, other=0).to(tl.int64)
    kv_head = head // num_heads * (num_heads // repeats) + h // repeats
    gates = _gates(
        q + b * stride_b + h.to(tl.int64) * stride_h,
        means + kv_head.to(tl.int64) * num_chunks * D,
        inside,
        num_chunks,
        tokens * stride_n,
        D,
        DIMS,
        ROWS,
        CHUNKS,
        SPLIT,
        FACTOR,
    )
    columns = tl.arange(0, CHUNKS)
    own_chunk = tl.load(chunk_of_row + rows, mask=inside, other=0)
    own = own_chunk[:, None] == columns[None, :]
    foreign = (columns < num_chunks)[None, :] & ~own
    if BY_SHARE:
        kept = _foreign_by_share(gates, own, foreign, THRESHOLD, ROWS)
    else:
        kept = _highest_foreign(gates, foreign, num_foreign, ROWS)
    bits = (kept | own).to(tl.int32) << (columns % 32)[None, :]
    # Bits of a word are different, so their sum is their union.
    packed = tl.sum(tl.reshape(bits, [ROWS, CHUNKS // 32, 32]), 2)
    places = tl.arange(0, CHUNKS // 32)
    target = row_mask + (head.to(tl.int64) * num_rows + rows)[:, None] * words + places[None, :]
    tl.store(target, packed, mask=inside[:, None] & (places < words)[None, :])
