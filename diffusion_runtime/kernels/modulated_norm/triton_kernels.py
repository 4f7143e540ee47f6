"""The Triton kernel of residual sum, norm and modulation. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def modulated_norm(
    x,
    branch,
    out,
    scales,
    gate,
    branch_weight,
    weight,
    bias,
    scale,
    shift,
    num_tokens,
    x_stride_b,
    x_stride_t,
    branch_stride_b,
    branch_stride_t,
    out_stride_b,
    out_stride_t,
    gate_stride,
    scale_stride,
    shift_stride,
    eps,
    branch_eps,
    KIND: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BRANCH_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x += gate * rms_norm(branch) * branch_weight; out = norm(x) * (1 + scale) + shift. Grid: (runs of ROWS tokens,
    samples).

    x, branch, out: [batch, tokens, DIM] with strides; gate, scale, shift: [batch, DIM]; weights: [DIM]. KIND: layer,
    rms, or none for the sum alone. QUANTIZED: out is float8_e4m3fn, scales float32 [batch, tokens].
    """
    batch = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    in_row = columns < DIM
    inside = (tokens < num_tokens) & in_row
    place = x + batch * x_stride_b + tokens * x_stride_t + columns
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        source = branch + batch * branch_stride_b + tokens * branch_stride_t + columns
        added = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if HAS_BRANCH_NORM:
            added *= tl.rsqrt(tl.sum(added * added, axis=1) / DIM + branch_eps)[:, None]
            added *= tl.load(branch_weight + columns, mask=in_row, other=0.0).to(tl.float32)
        if HAS_GATE:
            added *= tl.load(gate + batch * gate_stride + columns, mask=in_row, other=0.0).to(tl.float32)
        rounded = (value + added).to(x.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if KIND != "none":
        if KIND == "layer":
            value = tl.where(in_row, value - (tl.sum(value, axis=1) / DIM)[:, None], 0.0)
        value *= tl.rsqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None]
        if HAS_WEIGHT:
            value *= tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + columns, mask=in_row, other=0.0).to(tl.float32)
        if HAS_SCALE:
            value *= 1.0 + tl.load(scale + batch * scale_stride + columns, mask=in_row, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            value += tl.load(shift + batch * shift_stride + columns, mask=in_row, other=0.0).to(tl.float32)
        target = out + batch * out_stride_b + tokens * out_stride_t + columns
        if QUANTIZED:
            # As a pass of its own would read it: one pass and two give equal numbers.
            value = value.to(x.dtype.element_ty).to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12)
            tl.store(scales + batch * num_tokens + tokens, tl.div_rn(largest, 448.0)[:, None], mask=tokens < num_tokens)
            # One division per row: one per number took as long as all memory traffic (41 instead of 20 us at 4608 x
            # 3072 on an H200). At most 448.00003, which the conversion rounds to 448.
            value *= tl.div_rn(448.0, largest)[:, None]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)
