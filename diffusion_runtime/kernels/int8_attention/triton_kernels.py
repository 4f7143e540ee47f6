"""The Triton kernels of 8-bit attention; reference.py defines what is computed. Shapes: B batch, H heads, D head_dim.

Two tricks keep conversions out of the inner loop, which the tensor cores would wait for. An int32 n of less than 2^22
in magnitude, added to the bits of 1.5 * 2^23, is the bits of the float 1.5 * 2^23 + n. And a float of less than 2^22,
added to 1.5 * 2^23, holds the nearest integer in its low bits.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

# 1.5 * 2^23 and its bits.
SHIFT = tl.constexpr(12582912.0)
SHIFT_BITS = tl.constexpr(0x4B400000)
TINY = tl.constexpr(1e-30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sum_tokens(
    k,
    v,
    partial,
    num_tokens,
    tokens_per_program,
    num_heads,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """partial [B * H, programs, 4, D]: sums of k and of v, the lowest and the highest v. Grid: (programs, B * H)."""
    head = tl.program_id(1)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    dims = tl.arange(0, D)
    k_sum = tl.zeros([D], tl.float32)
    v_sum = tl.zeros([D], tl.float32)
    low = tl.full([D], float("inf"), tl.float32)
    high = tl.full([D], float("-inf"), tl.float32)
    first = tl.program_id(0) * tokens_per_program
    for start in range(first, tl.minimum(first + tokens_per_program, num_tokens), ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_tokens)[:, None]
        places = rows.to(tl.int64)[:, None]
        keys = tl.load(k + b * k_b + h * k_h + places * k_n + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        held = tl.load(v + b * v_b + h * v_h + places * v_n + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        k_sum += tl.sum(keys, 0)
        v_sum += tl.sum(held, 0)
        low = tl.minimum(low, tl.min(tl.where(inside, held, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, held, float("-inf")), 0))
    target = partial + (head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 4 * D + dims
    tl.store(target, k_sum)
    tl.store(target + D, v_sum)
    tl.store(target + 2 * D, low)
    tl.store(target + 3 * D, high)


@triton.jit
def finish_sums(
    partial, means, v_scales, num_partial, num_tokens, D: tl.constexpr, PARTIAL: tl.constexpr, LEVEL: tl.constexpr
):
    """means [2, B * H, D] of k and of v, v_scales [B * H, D]. Grid: (B * H,)."""
    head = tl.program_id(0)
    dims = tl.arange(0, D)
    places = tl.arange(0, PARTIAL)
    inside = (places < num_partial)[:, None]
    source = partial + head.to(tl.int64) * num_partial * 4 * D + places[:, None] * 4 * D + dims[None, :]
    k_mean = tl.sum(tl.load(source, mask=inside, other=0.0), 0) / num_tokens
    v_mean = tl.sum(tl.load(source + D, mask=inside, other=0.0), 0) / num_tokens
    low = tl.min(tl.load(source + 2 * D, mask=inside, other=float("inf")), 0)
    high = tl.max(tl.load(source + 3 * D, mask=inside, other=float("-inf")), 0)
    target = means + head * D + dims
    tl.store(target, k_mean)
    tl.store(target + tl.num_programs(0) * D, v_mean)
    highest = tl.maximum(high - v_mean, v_mean - low)
    tl.store(v_scales + head * D + dims, tl.maximum(highest, TINY) / LEVEL)


@triton.jit
def _to_int8(x):
    """Return the nearest integers of numbers within [-127, 127], halves to even."""
    return (x + SHIFT).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantize_queries(
    q,
    k_means,
    q8,
    q_scales,
    biases,
    scale,
    num_tokens,
    num_padded,
    num_heads,
    repeats,
    q_b,
    q_n,
    q_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """q8 [B * H, padded, D], q_scales [B * H, padded]; biases [B * H, padded], what the keys' mean takes from the
    log-sum-exp. Grid: (padded / ROWS, B * H)."""
    head = tl.program_id(1)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    inside = (rows < num_tokens)[:, None]
    source = q + b * q_b + h.to(tl.int64) * q_h + rows.to(tl.int64)[:, None] * q_n + dims[None, :]
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    highest = tl.maximum(tl.max(tl.abs(x), 1), TINY)
    sign = tl.where(scale < 0, -127.0, 127.0)
    place = head.to(tl.int64) * num_padded + rows
    tl.store(q8 + place[:, None] * D + dims[None, :], _to_int8(x * (sign / highest)[:, None]))
    # A maximum does not see NaN; a sum does.
    tl.store(q_scales + place, highest * (tl.abs(scale) * LOG2_E / 127) + 0.0 * tl.sum(x, 1))
    if HAS_BIAS:
        kv_head = head // num_heads * (num_heads // repeats) + h // repeats
        mean = tl.load(k_means + kv_head * D + dims)
        tl.store(biases + place, scale * tl.sum(x * mean[None, :], 1))


@triton.jit
def quantize_keys_and_values(
    k,
    v,
    means,
    v_scales,
    k8,
    k_scales,
    held,
    v_sums,
    num_tokens,
    num_padded,
    num_heads,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):
    """k8 [B * H, padded, D], k_scales [B * H, blocks]; held, the values [B * H, D, padded]: 8-bit products read both
    factors along the axis that they sum over. v_sums int32 [B * H, blocks, D]: 128 times the sum of a block's values,
    for int8. Grid: (blocks, B * H)."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, D)
    inside = (rows < num_tokens)[:, None]
    places = rows.to(tl.int64)[:, None]
    k_mean = tl.load(means + head * D + dims)
    v_mean = tl.load(means + (tl.num_programs(1) + head) * D + dims)
    keys = tl.load(k + b * k_b + h * k_h + places * k_n + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    keys = tl.where(inside, keys - k_mean[None, :], 0.0)
    highest = tl.maximum(tl.max(tl.max(tl.abs(keys), 1), 0), TINY)
    wide = head.to(tl.int64)
    tl.store(k8 + (wide * num_padded + rows)[:, None] * D + dims[None, :], _to_int8(keys * (127.0 / highest)))
    # NaN and inf in a key are in the mean.
    tl.store(k_scales + head * tl.num_programs(0) + block, highest / 127 + 0.0 * tl.sum(k_mean, 0))
    x = tl.load(v + b * v_b + h * v_h + places * v_n + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, (x - v_mean[None, :]) / tl.load(v_scales + head * D + dims)[None, :], 0.0)
    if VALUES == "int8":
        numbers = _to_int8(x)
        sums = 128 * tl.sum(numbers.to(tl.int32), 0)
        tl.store(v_sums + (head * tl.num_programs(0) + block) * D + dims, sums)
    else:
        numbers = x.to(held.dtype.element_ty)
    target = held + (wide * D + dims)[:, None] * num_padded + rows[None, :]
    tl.store(target, tl.trans(numbers))


@triton.jit
def _load_tile(source, row, column, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BULK: tl.constexpr):
    """Load a tile of a matrix [rows, stride]: one bulk copy from a descriptor, or through pointers."""
    if BULK:
        tile = source.load([row, column])
    else:
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        tile = tl.load(source + rows[:, None] * stride + (column + tl.arange(0, COLUMNS))[None, :])
    return tile


@triton.jit
def _scores(q, k):
    """q k^T of int8, exact, as floats 1.5 * 2^23 too high."""
    return (tl.dot(q, tl.trans(k), out_dtype=tl.int32) + SHIFT_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _add_block(
    scores,
    held,
    v_sums,
    q_scale,
    k_scale,
    visible,
    acc,
    row_max,
    row_sum,
    MASKED: tl.constexpr,
    VALUES: tl.constexpr,
    LOG2_LEVEL: tl.constexpr,
):
    """Compute a step of the online softmax, base 2. scores: from _scores; held: [D, keys]; v_sums: [D]; visible:
    [keys]."""
    factor = q_scale * k_scale
    if MASKED:
        # Lower than any score is with its shift.
        scores = tl.where(visible[None, :], scores, 0.0)
    top = (tl.max(scores, 1) - SHIFT) * factor
    offset = LOG2_LEVEL - (top + factor * SHIFT)
    weights = tl.exp2(tl.fma(scores, factor[:, None], offset[:, None]))
    if MASKED:
        weights = tl.where(visible[None, :], weights, 0.0)
    new_max = tl.maximum(row_max, top)
    kept = tl.exp2(row_max - new_max)
    # Weights are relative to the highest of the block, so that all of its bits are used.
    share = tl.exp2(top - new_max)
    row_sum = row_sum * kept + tl.sum(weights, 1) * share
    if VALUES == "int8":
        # Weights of 0 to 255 as -128 to 127; what that takes from the sums is in v_sums.
        signed = (weights + (SHIFT - 128.0)).to(tl.int32, bitcast=True).to(tl.int8)
        start = tl.zeros_like(acc).to(tl.int32) + (v_sums + SHIFT_BITS)[None, :]
        product = tl.dot(signed, tl.trans(held), start, out_dtype=tl.int32).to(tl.float32, bitcast=True)
        acc = tl.fma(product, share[:, None], tl.fma(acc, kept[:, None], (share * -SHIFT)[:, None]))
    else:
        # Summed from 0 in every block: the tensor cores add 8-bit floats with some 13 bits.
        product = tl.dot(weights.to(held.dtype), tl.trans(held))
        acc = tl.fma(product, share[:, None], acc * kept[:, None])
    return acc, new_max, row_sum


@triton.jit
def attend(
    q_rows,
    k_rows,
    v_rows,
    q_scales,
    k_scales,
    v_sums,
    v_scales,
    v_means,
    biases,
    out,
    lse,
    num_q,
    num_k,
    q_padded,
    k_padded,
    num_heads,
    repeats,
    out_b,
    out_n,
    out_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    LOG2_LEVEL: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BULK: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS queries of a head against all keys. Grid: (tiles of queries, B * H).

    AHEAD: the scores of a block are computed while the softmax of the one before runs.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = head // num_heads
    h = head % num_heads
    kv_head = b * (num_heads // repeats) + h // repeats
    dims = tl.arange(0, D)
    columns = tl.arange(0, BLOCK)
    first = tile * ROWS
    q = _load_tile(q_rows, head * q_padded + first, 0, D, ROWS, D, BULK)
    rows = first + tl.arange(0, ROWS)
    q_scale = tl.load(q_scales + head.to(tl.int64) * q_padded + rows)
    k_first = kv_head * k_padded
    v_first = kv_head * D
    my_k_scales = k_scales + kv_head * (k_padded // BLOCK)
    my_v_sums = v_sums + kv_head * (k_padded // BLOCK) * D + dims
    acc = tl.zeros([ROWS, D], dtype=tl.float32)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    num_whole = num_k // BLOCK
    v_sum = tl.zeros([D], dtype=tl.int32)
    if AHEAD:
        scores = _scores(q, _load_tile(k_rows, k_first, 0, D, BLOCK, D, BULK))
        # The scores of one block too many: past the last whole block lie the rest, or the rows of another head.
        for block in tl.range(0, num_whole, num_stages=STAGES):
            following = tl.minimum((block + 1) * BLOCK, k_padded - BLOCK)
            k = _load_tile(k_rows, k_first + following, 0, D, BLOCK, D, BULK)
            held = _load_tile(v_rows, v_first, block * BLOCK, k_padded, D, BLOCK, BULK)
            next_scores = _scores(q, k)
            if VALUES == "int8":
                v_sum = tl.load(my_v_sums + block * D)
            k_scale = tl.load(my_k_scales + block)
            acc, row_max, row_sum = _add_block(
                scores, held, v_sum, q_scale, k_scale, None, acc, row_max, row_sum, False, VALUES, LOG2_LEVEL
            )
            scores = next_scores
    else:
        for block in tl.range(0, num_whole, num_stages=STAGES):
            k = _load_tile(k_rows, k_first + block * BLOCK, 0, D, BLOCK, D, BULK)
            held = _load_tile(v_rows, v_first, block * BLOCK, k_padded, D, BLOCK, BULK)
            if VALUES == "int8":
                v_sum = tl.load(my_v_sums + block * D)
            k_scale = tl.load(my_k_scales + block)
            acc, row_max, row_sum = _add_block(
                _scores(q, k), held, v_sum, q_scale, k_scale, None, acc, row_max, row_sum, False, VALUES, LOG2_LEVEL
            )
    if num_whole * BLOCK < num_k:
        k = _load_tile(k_rows, k_first + num_whole * BLOCK, 0, D, BLOCK, D, BULK)
        held = _load_tile(v_rows, v_first, num_whole * BLOCK, k_padded, D, BLOCK, BULK)
        if VALUES == "int8":
            v_sum = tl.load(my_v_sums + num_whole * D)
        k_scale = tl.load(my_k_scales + num_whole)
        visible = num_whole * BLOCK + columns < num_k
        acc, row_max, row_sum = _add_block(
            _scores(q, k), held, v_sum, q_scale, k_scale, visible, acc, row_max, row_sum, True, VALUES, LOG2_LEVEL
        )
    scale = tl.load(v_scales + kv_head * D + dims)
    mean = tl.load(v_means + kv_head * D + dims)
    acc = acc / row_sum[:, None] * scale[None, :] + mean[None, :]
    inside = rows < num_q
    target = out + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + rows.to(tl.int64)[:, None] * out_n + dims[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None])
    if HAS_LSE:
        bias = tl.load(biases + head.to(tl.int64) * q_padded + rows)
        natural = (row_max + tl.log2(row_sum) - LOG2_LEVEL) * LN_2 + bias
        tl.store(lse + head.to(tl.int64) * num_q + rows, natural, mask=inside)
