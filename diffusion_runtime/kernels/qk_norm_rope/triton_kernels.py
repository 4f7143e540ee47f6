"""The Triton kernel of QK norm and rotary positions. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_rope(
    x,
    out,
    weight_0,
    weight_1,
    rotations,
    means,
    x_stride_b,
    x_stride_t,
    x_stride_p,
    out_stride_b,
    out_stride_t,
    out_stride_p,
    turn_stride_b,
    turn_stride_t,
    turn_stride_h,
    eps,
    NUM_NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVER_HEADS: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    HAS_ROTATIONS: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """out [batch, tokens, parts, HEADS, HEAD_DIM]: the parts of x, the first NUM_NORMED normalised, scaled by their
    weight and rotated. Grid: (tokens, parts, samples). x and out may be one tensor: a program reads what it writes.

    weights: [HEAD_DIM], or [HEADS * HEAD_DIM] with OVER_HEADS, where the norm is over all heads. means: float32
    [batch, tokens, NUM_NORMED], with HAS_MEANS: the mean squares over more heads than these. rotations: float32
    pairs of cosine and sine, [.., HEAD_DIM / 2, 2]: laid out like x, so that both split into pairs alike.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    channels = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (heads < HEADS) & (channels < HEAD_DIM)
    places = heads * HEAD_DIM + channels
    value = tl.load(x + batch * x_stride_b + token * x_stride_t + part * x_stride_p + places, mask=inside, other=0.0)
    target = out + batch * out_stride_b + token * out_stride_t + part * out_stride_p + places
    if part >= NUM_NORMED:
        tl.store(target, value, mask=inside)
    else:
        # Each load from its own pointer: one that is chosen at run time is not known to be aligned.
        in_weight = inside if OVER_HEADS else channels < HEAD_DIM
        weight_places = places if OVER_HEADS else channels
        if part == 0:
            weight = tl.load(weight_0 + weight_places, mask=in_weight, other=0.0).to(tl.float32)
        else:
            weight = tl.load(weight_1 + weight_places, mask=in_weight, other=0.0).to(tl.float32)
        wide = value.to(tl.float32)
        squares = tl.sum(wide * wide, axis=1)
        if HAS_MEANS:
            wide *= tl.rsqrt(tl.load(means + (batch * tl.num_programs(0) + token) * NUM_NORMED + part) + eps)
        elif OVER_HEADS:
            wide *= tl.rsqrt(tl.sum(squares, axis=0) / (HEADS * HEAD_DIM) + eps)
        else:
            wide *= tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        wide *= weight
        if HAS_ROTATIONS:
            row = rotations + batch * turn_stride_b + token * turn_stride_t
            if BY_HEAD:
                turns = tl.load(row + heads * turn_stride_h + channels, mask=inside, other=0.0)
                cos, sin = tl.split(tl.reshape(turns, [HEADS_BLOCK, DIM_BLOCK // 2, 2]))
            else:
                turns = tl.load(row + channels, mask=channels < HEAD_DIM, other=0.0)
                cos, sin = tl.split(tl.reshape(turns, [1, DIM_BLOCK // 2, 2]))
            even, odd = tl.split(tl.reshape(wide, [HEADS_BLOCK, DIM_BLOCK // 2, 2]))
            wide = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [HEADS_BLOCK, DIM_BLOCK])
        tl.store(target, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_rope_blocks(
    x,
    out,
    means,
    weight_0,
    weight_1,
    rotations,
    offsets,
    text_lengths,
    num_tokens,
    num_grid,
    num_blocks,
    x_stride_b,
    x_stride_t,
    x_stride_p,
    out_stride_p,
    means_stride_p,
    turn_stride_b,
    turn_stride_t,
    turn_stride_h,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    TEXT_RUN: tl.constexpr,
    TAIL: tl.constexpr,
    OVER_HEADS: tl.constexpr,
    HAS_ROTATIONS: tl.constexpr,
    BY_HEAD: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    NUM_AVERAGED: tl.constexpr,
):
    """Apply norm_rope to the parts q, k, v of x into packed rows out [3, batch * HEADS * tokens + TAIL, WIDTH], one
    head after the other: grid tokens block by block, then the text. Also write the block means of the first
    NUM_AVERAGED parts, taken from the numbers that are written. Grid: (blocks, then runs of TEXT_RUN text tokens;
    parts; samples). One program sums one block in order, so every run gives the same bits."""
    run = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.arange(0, HEADS_BLOCK)[None, :, None]
    channels = tl.arange(0, WIDTH)[None, None, :]
    in_token = (heads < HEADS) & (channels < HEAD_DIM)
    places = heads * HEAD_DIM + channels
    rows = out + part.to(tl.int64) * out_stride_p
    if (run == 0) & (batch == tl.num_programs(2) - 1):
        # Bulk copies read them with weight 0.
        tail = rows + (batch + 1) * HEADS * num_tokens * WIDTH + tl.arange(0, TAIL)[:, None] * WIDTH
        tl.store(tail + tl.arange(0, WIDTH)[None, :], tl.zeros([TAIL, WIDTH], out.dtype.element_ty))
    if run < num_blocks:
        position = tl.load(offsets + run)
        stop = tl.load(offsets + run + 1)
    else:
        position = num_grid + (run - num_blocks) * TEXT_RUN
        stop = tl.minimum(position + TEXT_RUN, num_tokens)
    length = stop - position
    readable = num_tokens
    if HAS_LENGTHS:
        readable = num_grid + tl.load(text_lengths + batch)
    # Each load from its own pointer, as in norm_rope.
    weight_places = places if OVER_HEADS else channels
    in_weight = in_token if OVER_HEADS else channels < HEAD_DIM
    if part == 0:
        weight = tl.load(weight_0 + weight_places, mask=in_weight, other=0.0).to(tl.float32)
    else:
        weight = tl.load(weight_1 + weight_places, mask=in_weight, other=0.0).to(tl.float32)
    total = tl.zeros([HEADS_BLOCK, WIDTH], tl.float32)
    # Not range(): its bounds are read on the device, which Triton 3.6's interpreter cannot do with NumPy 2.4.
    while position < stop:
        tokens = (position + tl.arange(0, STEP)[:, None, None]).to(tl.int64)
        inside = (tokens < stop) & in_token
        source = x + batch * x_stride_b + tokens * x_stride_t + part * x_stride_p + places
        value = tl.load(source, mask=inside & (tokens < readable), other=0.0)
        if part < 2:
            wide = value.to(tl.float32)
            squares = tl.sum(wide * wide, axis=2)
            if OVER_HEADS:
                wide *= tl.rsqrt(tl.sum(squares, axis=1) / (HEADS * HEAD_DIM) + eps)[:, None, None]
            else:
                wide *= tl.rsqrt(squares / HEAD_DIM + eps)[:, :, None]
            wide *= weight
            if HAS_ROTATIONS:
                turn_rows = rotations + batch * turn_stride_b + tokens * turn_stride_t
                if BY_HEAD:
                    turns = tl.load(turn_rows + heads * turn_stride_h + channels, mask=inside, other=0.0)
                    cos, sin = tl.split(tl.reshape(turns, [STEP, HEADS_BLOCK, WIDTH // 2, 2]))
                else:
                    in_table = (tokens < stop) & (channels < HEAD_DIM)
                    turns = tl.load(turn_rows + channels, mask=in_table, other=0.0)
                    cos, sin = tl.split(tl.reshape(turns, [STEP, 1, WIDTH // 2, 2]))
                even, odd = tl.split(tl.reshape(wide, [STEP, HEADS_BLOCK, WIDTH // 2, 2]))
                turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
                wide = tl.reshape(turned, [STEP, HEADS_BLOCK, WIDTH])
            value = wide.to(out.dtype.element_ty)
        target = rows + ((batch * HEADS + heads) * num_tokens + tokens) * WIDTH + channels
        # With the columns past HEAD_DIM, which are 0.
        tl.store(target, value, mask=(tokens < stop) & (heads < HEADS))
        if NUM_AVERAGED > 0:
            total += tl.sum(value.to(tl.float32), axis=0)
        position += STEP
    if NUM_AVERAGED > 0:
        if (run < num_blocks) & (part < NUM_AVERAGED):
            mean = total / tl.maximum(length, 1).to(tl.float32)
            head = tl.arange(0, HEADS_BLOCK)[:, None]
            channel = tl.arange(0, WIDTH)[None, :]
            place = ((batch * HEADS + head) * num_blocks + run) * HEAD_DIM + channel
            tl.store(
                means + part.to(tl.int64) * means_stride_p + place, mean, mask=(head < HEADS) & (channel < HEAD_DIM)
            )
