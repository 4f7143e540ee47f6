"""The Triton kernels around attention in 8-bit floats; reference.py defines what is computed.

Shapes: B batch, H heads, D head_dim.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(1e-10)
HIGHEST = tl.constexpr(448.0)


@triton.jit
def _rows_of(x, b, h, rows, num_tokens, stride_b, stride_n, stride_h, D: tl.constexpr):
    """Load [rows, D] of one head as float32, with zeros past the end."""
    dims = tl.arange(0, D)
    places = rows.to(tl.int64)[:, None]
    source = x + b * stride_b + h.to(tl.int64) * stride_h + places * stride_n + dims[None, :]
    return tl.load(source, mask=(rows < num_tokens)[:, None], other=0.0).to(tl.float32)


@triton.jit
def gather_statistics(
    q,
    k,
    v,
    partial,
    partial_norms,
    num_q,
    num_k,
    q_per_program,
    k_per_program,
    num_kv_heads,
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
    ROWS: tl.constexpr,
    REPEATS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """partial [B * H, programs, 4, D]: sums of k and of v, the lowest and the highest v; partial_norms [B * H,
    programs, 2]: the largest squared norms of queries and of keys. H counts kv heads.

    Grid: (programs, B * H, 2): keys and values, queries.
    """
    head = tl.program_id(1)
    b = (head // num_kv_heads).to(tl.int64)
    h = head % num_kv_heads
    dims = tl.arange(0, D)
    norm = tl.zeros([ROWS], tl.float32)
    place = head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if tl.program_id(2) == 1:
        first = tl.program_id(0) * q_per_program
        for repeat in range(REPEATS):
            for start in tl.range(first, tl.minimum(first + q_per_program, num_q), ROWS, num_stages=STAGES):
                queries = _rows_of(q, b, h * REPEATS + repeat, start + tl.arange(0, ROWS), num_q, q_b, q_n, q_h, D)
                norm = tl.maximum(norm, tl.sum(queries * queries, 1))
        tl.store(partial_norms + place * 2, tl.max(norm, 0))
    else:
        k_sum = tl.zeros([ROWS, D], tl.float32)
        v_sum = tl.zeros([ROWS, D], tl.float32)
        low = tl.full([ROWS, D], float("inf"), tl.float32)
        high = tl.full([ROWS, D], float("-inf"), tl.float32)
        first = tl.program_id(0) * k_per_program
        for start in tl.range(first, tl.minimum(first + k_per_program, num_k), ROWS, num_stages=STAGES):
            rows = start + tl.arange(0, ROWS)
            inside = (rows < num_k)[:, None]
            keys = _rows_of(k, b, h, rows, num_k, k_b, k_n, k_h, D)
            values = _rows_of(v, b, h, rows, num_k, v_b, v_n, v_h, D)
            k_sum += keys
            v_sum += values
            low = tl.minimum(low, tl.where(inside, values, float("inf")))
            high = tl.maximum(high, tl.where(inside, values, float("-inf")))
            norm = tl.maximum(norm, tl.sum(keys * keys, 1))
        tl.store(partial + place * 4 * D + dims, tl.sum(k_sum, 0))
        tl.store(partial + place * 4 * D + D + dims, tl.sum(v_sum, 0))
        tl.store(partial + place * 4 * D + 2 * D + dims, tl.min(low, 0))
        tl.store(partial + place * 4 * D + 3 * D + dims, tl.max(high, 0))
        tl.store(partial_norms + place * 2 + 1, tl.max(norm, 0))


@triton.jit
def finish_statistics(
    partial, partial_norms, means, v_scales, norms, num_partial, num_k, D: tl.constexpr, PARTIAL: tl.constexpr
):
    """means [2, B * H, D] of k and of v, v_scales [B * H, D], norms [2, B * H] of q and of k. Grid: (B * H,)."""
    head = tl.program_id(0)
    dims = tl.arange(0, D)
    places = tl.arange(0, PARTIAL)
    inside = places < num_partial
    source = partial + head.to(tl.int64) * num_partial * 4 * D + places[:, None] * 4 * D + dims[None, :]
    mask = inside[:, None]
    k_mean = tl.sum(tl.load(source, mask=mask, other=0.0), 0) / num_k
    v_mean = tl.sum(tl.load(source + D, mask=mask, other=0.0), 0) / num_k
    low = tl.min(tl.load(source + 2 * D, mask=mask, other=float("inf")), 0)
    high = tl.max(tl.load(source + 3 * D, mask=mask, other=float("-inf")), 0)
    target = means + head * D + dims
    tl.store(target, k_mean)
    tl.store(target + tl.num_programs(0) * D, v_mean)
    highest = tl.maximum(high - v_mean, v_mean - low)
    tl.store(v_scales + head * D + dims, tl.maximum(highest, TINY) / HIGHEST)
    of_norms = partial_norms + (head * num_partial + places) * 2
    q_norm = tl.sqrt(tl.max(tl.load(of_norms, mask=inside, other=0.0), 0))
    k_norm = tl.sqrt(tl.max(tl.load(of_norms + 1, mask=inside, other=0.0), 0)) + tl.sqrt(tl.sum(k_mean * k_mean, 0))
    # A maximum does not see NaN; a sum does.
    tl.store(norms + head, tl.maximum(q_norm, TINY))
    tl.store(norms + tl.num_programs(0) + head, tl.maximum(k_norm, TINY) + 0.0 * tl.sum(k_mean, 0))


@triton.jit
def _shared_product(norms, num_heads, HEADS: tl.constexpr):
    """Return what every head's two factors multiply to."""
    heads = tl.arange(0, HEADS)
    inside = heads < num_heads
    q_norms = tl.load(norms + heads, mask=inside, other=0.0)
    k_norms = tl.load(norms + num_heads + heads, mask=inside, other=0.0)
    return HIGHEST * HIGHEST / tl.max(q_norms * k_norms, 0)


@triton.jit
def _to_e4m3(x, dtype: tl.constexpr):
    return tl.clamp(x, -HIGHEST, HIGHEST, tl.PropagateNan.ALL).to(dtype)


@triton.jit
def _rotation(DTYPE: tl.constexpr, D: tl.constexpr):
    """Return reference.rotation, [D, D] of 1 and -1; no tensor of it need be kept on a device."""
    dims = tl.arange(0, D)
    both = dims[:, None] & (dims[None, :] ^ (dims >> 1)[:, None])
    bits = both ^ (both >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return (1 - 2 * (bits & 1)).to(tl.float32).to(DTYPE)


@triton.jit
def _turned(x, matrix, D: tl.constexpr):
    """x [rows, D] times the rotation [D, D]."""
    return tl.dot(x.to(tl.bfloat16).to(matrix.dtype), matrix) * D**-0.5


@triton.jit
def quantize_queries(
    q,
    means,
    norms,
    q8,
    scales,
    biases,
    scale,
    num_tokens,
    num_heads,
    num_kv_rows,
    q_b,
    q_n,
    q_h,
    out_b,
    out_n,
    out_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    REPEATS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """q8 like q; scales [16], of which every fourth is a number that cuDNN's graph reads: descale, 1, 1 / 448, 448;
    biases [B * H, num_tokens], what the keys' mean takes from the log-sum-exp.

    Grid: (blocks of TILES * ROWS tokens, B * H).
    """
    head = tl.program_id(1)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    kv_head = head // num_heads * (num_heads // REPEATS) + h // REPEATS
    dims = tl.arange(0, D)
    product = _shared_product(norms, num_kv_rows, HEADS)
    factor = tl.sqrt(product * tl.load(norms + num_kv_rows + kv_head) / tl.load(norms + kv_head))
    matrix = _rotation(DTYPE, D)
    first = tl.program_id(0) * TILES * ROWS
    for start in tl.range(first, tl.minimum(first + TILES * ROWS, num_tokens), ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = rows < num_tokens
        x = _rows_of(q, b, h, rows, num_tokens, q_b, q_n, q_h, D)
        if HAS_BIAS:
            mean = tl.load(means + kv_head * D + dims)
            place = head.to(tl.int64) * num_tokens + rows
            tl.store(biases + place, scale * tl.sum(x * mean[None, :], 1), mask=inside)
        target = q8 + b * out_b + h.to(tl.int64) * out_h + rows.to(tl.int64)[:, None] * out_n + dims[None, :]
        tl.store(target, _to_e4m3(_turned(x, matrix, D) * factor, q8.dtype.element_ty), mask=inside[:, None])
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(scales, 1.0 / product)
        tl.store(scales + 4, 1.0)
        tl.store(scales + 8, 1.0 / HIGHEST)
        tl.store(scales + 12, HIGHEST * 1.0)


@triton.jit
def quantize_keys_and_values(
    k,
    v,
    means,
    v_scales,
    norms,
    k8,
    v8,
    num_tokens,
    num_heads,
    num_kv_rows,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    out_b,
    out_n,
    out_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """k8 and v8 like k and v. Grid: (blocks of TILES * ROWS tokens, B * H)."""
    head = tl.program_id(1)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    dims = tl.arange(0, D)
    product = _shared_product(norms, num_kv_rows, HEADS)
    factor = tl.sqrt(product * tl.load(norms + head) / tl.load(norms + num_kv_rows + head))
    matrix = _rotation(DTYPE, D)
    k_mean = tl.load(means + head * D + dims)[None, :]
    v_mean = tl.load(means + (num_kv_rows + head) * D + dims)[None, :]
    v_scale = tl.load(v_scales + head * D + dims)[None, :]
    first = tl.program_id(0) * TILES * ROWS
    for start in tl.range(first, tl.minimum(first + TILES * ROWS, num_tokens), ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_tokens)[:, None]
        place = b * out_b + h.to(tl.int64) * out_h + rows.to(tl.int64)[:, None] * out_n + dims[None, :]
        keys = _rows_of(k, b, h, rows, num_tokens, k_b, k_n, k_h, D) - k_mean
        tl.store(k8 + place, _to_e4m3(_turned(keys, matrix, D) * factor, k8.dtype.element_ty), mask=inside)
        values = (_rows_of(v, b, h, rows, num_tokens, v_b, v_n, v_h, D) - v_mean) / v_scale
        tl.store(v8 + place, _to_e4m3(values, v8.dtype.element_ty), mask=inside)


@triton.jit
def restore_output(
    attended,
    v_scales,
    means,
    out,
    num_tokens,
    num_heads,
    num_kv_rows,
    in_b,
    in_n,
    in_h,
    out_b,
    out_n,
    out_h,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    REPEATS: tl.constexpr,
):
    """out = attended * v_scales + the values' mean, the second of means. Grid: (blocks of tokens, B * H)."""
    head = tl.program_id(1)
    b = (head // num_heads).to(tl.int64)
    h = head % num_heads
    kv_head = head // num_heads * (num_heads // REPEATS) + h // REPEATS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    x = _rows_of(attended, b, h, rows, num_tokens, in_b, in_n, in_h, D)
    v_mean = tl.load(means + (num_kv_rows + kv_head) * D + dims)
    x = x * tl.load(v_scales + kv_head * D + dims)[None, :] + v_mean[None, :]
    target = out + b * out_b + h.to(tl.int64) * out_h + rows.to(tl.int64)[:, None] * out_n + dims[None, :]
    tl.store(target, x.to(out.dtype.element_ty), mask=(rows < num_tokens)[:, None])
