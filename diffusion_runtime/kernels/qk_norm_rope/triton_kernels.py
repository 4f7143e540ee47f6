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
    HAS_ROTATIONS: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """out [batch, tokens, parts, HEADS, HEAD_DIM]: the parts of x, the first NUM_NORMED normalised, scaled by their
    weight and rotated. Grid: (tokens, parts, samples). x and out may be one tensor: a program reads what it writes.

    weights: [HEAD_DIM], or [HEADS * HEAD_DIM] with OVER_HEADS, where the norm is over all heads. rotations: float32
    pairs of cosine and sine, [.., HEAD_DIM / 2, 2]: as they lie beside x, so that both split into pairs alike.
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
        if OVER_HEADS:
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
