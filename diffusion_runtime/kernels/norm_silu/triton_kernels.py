"""The Triton kernels of norm and SiLU. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def norm_silu_by_pixel(
    x,
    sums,
    gamma,
    out,
    num_pixels,
    scale,
    eps,
    CHANNELS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    IS_RMS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """out = SiLU(x / length * scale * gamma), or without IS_RMS SiLU(x / sqrt(mean square + eps)). x, out: [C, pixels].

    HAS_SUMS: `sums`, [pixels], holds the lengths (float32) or the mean squares (x's dtype) as torch summed them, and
    every step rounds where torch's does; else they are summed here. LIBDEVICE: exp as CUDA's own expf computes it.
    Grid: (tiles of pixels,).
    """
    dtype = out.dtype.element_ty
    pixels = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    is_pixel = pixels < num_pixels
    rows = tl.arange(0, ROWS)
    if HAS_SUMS:
        divisor = tl.load(sums + pixels, mask=is_pixel, other=1.0).to(tl.float32)
        if not IS_RMS:
            divisor = (divisor + eps).to(dtype).to(tl.float32)
            divisor = tl.sqrt_rn(divisor).to(dtype).to(tl.float32)
    else:
        total = tl.zeros([PIXELS], tl.float32)
        for start in range(0, CHANNELS, ROWS):
            channels = start + rows
            inside = (channels < CHANNELS)[:, None] & is_pixel[None, :]
            place = channels.to(tl.int64)[:, None] * num_pixels + pixels[None, :]
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(value * value, axis=0)
        if not IS_RMS:
            total = total / CHANNELS + eps
        divisor = tl.sqrt_rn(total)
    if IS_RMS:
        divisor = tl.maximum(divisor, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    for start in range(0, CHANNELS, ROWS):
        channels = start + rows
        inside = (channels < CHANNELS)[:, None] & is_pixel[None, :]
        place = channels.to(tl.int64)[:, None] * num_pixels + pixels[None, :]
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.broadcast_to(divisor[None, :], [ROWS, PIXELS]))
        if HAS_SUMS:
            value = value.to(dtype).to(tl.float32)
        if IS_RMS:
            weight = tl.load(gamma + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32)
            value = value * scale
            if HAS_SUMS:
                value = value.to(dtype).to(tl.float32)
            value = value * weight[:, None]
            if HAS_SUMS:
                value = value.to(dtype).to(tl.float32)
            value = value + 0.0
        if LIBDEVICE:
            decay = libdevice.exp(-value)
        else:
            decay = tl.exp(-value)
        tl.store(out + place, tl.div_rn(value, 1.0 + decay).to(dtype), mask=inside)


@triton.jit
def moments_of_parts(x, moments, size, part, num_parts, num_moments, BLOCK: tl.constexpr):
    """moments [2, groups, parts]: each part's mean, and its sum of squares about that mean. x: [groups, size], in parts
    of `part` numbers, a multiple of BLOCK. Grid: (parts, groups)."""
    index = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first = index.to(tl.int64) * part
    count = tl.minimum(size - first, part)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, part, BLOCK):
        value = tl.load(x + group * size + first + start + lanes, mask=start + lanes < count, other=0.0)
        total += value.to(tl.float32)
    mean = tl.sum(total) / count
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, part, BLOCK):
        inside = start + lanes < count
        value = tl.load(x + group * size + first + start + lanes, mask=inside, other=0.0).to(tl.float32)
        difference = tl.where(inside, value - mean, 0.0)
        squares += difference * difference
    place = moments + group * num_parts + index
    tl.store(place, mean)
    tl.store(place + num_moments, tl.sum(squares))


@triton.jit
def group_norm_silu(x, mean, factor, bias, out, num_pixels, LIBDEVICE: tl.constexpr, BLOCK: tl.constexpr):
    """out = SiLU((x - mean) * factor + bias), rounded to its dtype before SiLU as torch's norm does. x, out:
    [C, pixels]; mean, factor: [C], float32; bias: [C]. Grid: (blocks, C)."""
    dtype = out.dtype.element_ty
    channel = tl.program_id(1).to(tl.int64)
    pixels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixels < num_pixels
    value = tl.load(x + channel * num_pixels + pixels, mask=inside, other=0.0).to(tl.float32)
    value = (value - tl.load(mean + channel)) * tl.load(factor + channel) + tl.load(bias + channel).to(tl.float32)
    value = value.to(dtype).to(tl.float32)
    if LIBDEVICE:
        decay = libdevice.exp(-value)
    else:
        decay = tl.exp(-value)
    tl.store(out + channel * num_pixels + pixels, tl.div_rn(value, 1.0 + decay).to(dtype), mask=inside)
