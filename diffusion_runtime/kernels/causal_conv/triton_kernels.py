"""The Triton kernels of a causal convolution's input. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from diffusion_runtime.kernels.exact_division import _divide_rows, _silu_of_half


@triton.jit
def channels_first_input(
    x,
    lengths,
    gamma,
    history,
    out,
    height,
    width,
    stride_c,
    stride_t,
    tiles_across,
    scale,
    FRAMES: tl.constexpr,
    PADDING: tl.constexpr,
    NORM: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [C, FRAMES + 2, H + 2P, W + 2P]: the history [C, 2, H, W], then SiLU(RMSNorm(x)), zeros around; history
    becomes the last two frames.

    x: [C, FRAMES, H, W] with contiguous planes. lengths: [FRAMES, H, W], float32. Grid: (C, tiles of a padded plane).
    A program owns its tile in every frame, so nothing else reads the history that it overwrites. The roundings are
    those of torch's single operations. LIBDEVICE: exp as CUDA's own expf computes it.
    """
    dtype = out.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    rows = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    padded_height = height + 2 * PADDING
    padded_width = width + 2 * PADDING
    inside = (rows >= PADDING) & (rows < height + PADDING) & (columns >= PADDING) & (columns < width + PADDING)
    written = (rows < padded_height) & (columns < padded_width)
    source = (rows - PADDING) * width + columns - PADDING
    target = rows * padded_width + columns
    plane = height * width
    padded_plane = padded_height * padded_width
    history += channel * 2 * plane
    out += channel * (FRAMES + 2) * padded_plane
    older = tl.load(history + source, mask=inside, other=0.0)
    newer = tl.load(history + plane + source, mask=inside, other=0.0)
    tl.store(out + target, older, mask=written)
    tl.store(out + padded_plane + target, newer, mask=written)
    if NORM:
        weight = tl.load(gamma + channel).to(tl.float32)
    for frame in tl.static_range(FRAMES):
        value = tl.load(x + channel * stride_c + frame * stride_t + source, mask=inside, other=0.0)
        if NORM:
            length = tl.load(lengths + frame * plane + source, mask=inside, other=1.0)
            length = tl.maximum(length, 1e-12, propagate_nan=tl.PropagateNan.ALL)
            normalized = tl.div_rn(value.to(tl.float32), length).to(dtype)
            scaled = (normalized.to(tl.float32) * scale).to(dtype)
            argument = (scaled.to(tl.float32) * weight).to(dtype).to(tl.float32) + 0.0
            if LIBDEVICE:
                decay = libdevice.exp(-argument)
            else:
                decay = tl.exp(-argument)
            value = tl.where(inside, tl.div_rn(argument, 1.0 + decay), 0.0).to(dtype)
        tl.store(out + (frame + 2) * padded_plane + target, value, mask=written)
        older = newer
        newer = value
    tl.store(history + source, older, mask=inside)
    tl.store(history + plane + source, newer, mask=inside)


@triton.jit
def add_bias_residual(
    x, bias, residual, num_frames, plane, stride_c, stride_t, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """x [C, T, plane] += bias [C], then += residual [C, T, plane] with contiguous planes. Grid: (blocks, C * T)."""
    dtype = x.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    channel = row // num_frames
    frame = row % num_frames
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < plane
    value = tl.load(x + row * plane + places, mask=inside).to(tl.float32)
    if HAS_BIAS:
        value = (value + tl.load(bias + channel).to(tl.float32)).to(dtype).to(tl.float32)
    value += tl.load(residual + channel * stride_c + frame * stride_t + places, mask=inside).to(tl.float32)
    tl.store(x + row * plane + places, value.to(dtype), mask=inside)


@triton.jit
def _sum_squares_in_torchs_order(
    x,
    bias,
    residual,
    rows,
    inside,
    x_stride,
    residual_stride,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Sums over the channels of the squares of x + bias + residual, [pixels], in the order of torch's reduction over
    strided channels: four threads take turns, each with four accumulators; those are added one after the other, then
    threads 0 and 2, 1 and 3, and both sums. For multiples of 16 channels, 64 or more.

    rows: [pixels], int64.
    """
    dtype = x.dtype.element_ty
    turns = tl.arange(0, 16)
    total = tl.zeros([rows.shape[0], 16], tl.float32)
    for step in range(CHANNELS // 16):
        columns = (step * 16 + turns)[None, :]
        value = tl.load(x + rows[:, None] * x_stride + columns, mask=inside[:, None], other=0.0).to(tl.float32)
        if HAS_BIAS:
            value = (value + tl.load(bias + columns).to(tl.float32)).to(dtype).to(tl.float32)
        if HAS_RESIDUAL:
            place = rows[:, None] * residual_stride + columns
            value += tl.load(residual + place, mask=inside[:, None], other=0.0).to(tl.float32)
            value = value.to(dtype).to(tl.float32)
        total += value * value
    # A channel is 16 * step + 4 * accumulator + thread.
    by_thread = tl.permute(tl.reshape(total, [rows.shape[0], 2, 2, 2, 2]), (0, 3, 4, 1, 2))
    even, odd = tl.split(by_thread)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    threads = ((first + second) + third) + fourth
    low, high = tl.split(tl.permute(threads, (0, 2, 1)))
    one, other = tl.split(low + high)
    return one + other


@triton.jit
def channels_last_input(
    x,
    bias,
    residual,
    gamma,
    history,
    out,
    plane,
    scale,
    x_stride,
    residual_stride,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIXELS: tl.constexpr,
    FRAMES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    IS_FIRST: tl.constexpr,
    TORCHS_ORDER: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """out [FRAMES + 2, plane, C]: the history [2, plane, C], then SiLU(RMSNorm(x + bias + residual)); history becomes
    the last two frames. IS_FIRST: out has no history, which counts as zeros.

    x, residual: [FRAMES, plane, C], whose pixels lie x_stride and residual_stride apart. HAS_RESIDUAL: x becomes the
    sum. TORCHS_ORDER: lengths are summed as torch sums them. Grid: (tiles of pixels,): a program owns its pixels in
    every frame, so nothing else reads the history that it overwrites. The roundings are those of torch's single
    operations.
    """
    dtype = out.dtype.element_ty
    pixels = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    columns = tl.arange(0, COLUMNS)
    inside = (pixels < plane)[:, None] & (columns < CHANNELS)[None, :]
    place = pixels.to(tl.int64)[:, None] * CHANNELS + columns[None, :]
    frame_size = plane.to(tl.int64) * CHANNELS
    if IS_FIRST:
        older = tl.zeros([PIXELS, COLUMNS], dtype)
        newer = older
    else:
        older = tl.load(history + place, mask=inside, other=0.0)
        newer = tl.load(history + frame_size + place, mask=inside, other=0.0)
        tl.store(out + place, older, mask=inside)
        tl.store(out + frame_size + place, newer, mask=inside)
        out += 2 * frame_size
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(gamma + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
    for frame in tl.static_range(FRAMES):
        rows = frame * plane.to(tl.int64) + pixels
        source = x + rows[:, None] * x_stride + columns[None, :]
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value = (value + shift[None, :]).to(dtype).to(tl.float32)
        if HAS_RESIDUAL:
            added = residual + rows[:, None] * residual_stride + columns[None, :]
            rounded = (value + tl.load(added, mask=inside, other=0.0).to(tl.float32)).to(dtype)
            value = rounded.to(tl.float32)
        if NORM:
            if TORCHS_ORDER:
                squares = _sum_squares_in_torchs_order(
                    x,
                    bias,
                    residual,
                    rows,
                    pixels < plane,
                    x_stride,
                    residual_stride,
                    CHANNELS,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                )
            else:
                squares = tl.sum(value * value, axis=1)
        if HAS_RESIDUAL:
            # Not before every thread has read what it sums.
            tl.debug_barrier()
            tl.store(source, rounded, mask=inside)
        if NORM:
            length = tl.maximum(tl.sqrt_rn(squares), 1e-12, propagate_nan=tl.PropagateNan.ALL)
            value = _divide_rows(value, length).to(dtype).to(tl.float32)
            value = (value * scale).to(dtype).to(tl.float32)
            value = (value * weight[None, :]).to(dtype).to(tl.float32)
            if not LIBDEVICE:
                value = tl.div_rn(value, 1.0 + tl.exp(-value))
            elif dtype == tl.float32:
                value = tl.div_rn(value, 1.0 + libdevice.exp(-value))
            else:
                value = _silu_of_half(value)
        result = value.to(dtype)
        tl.store(out + frame * frame_size + place, result, mask=inside)
        older = newer
        newer = result
    tl.store(history + place, older, mask=inside)
    tl.store(history + frame_size + place, newer, mask=inside)
