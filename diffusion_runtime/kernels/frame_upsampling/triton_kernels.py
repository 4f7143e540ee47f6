"""The Triton kernels of upsampling. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upsample_channels_first(
    x,
    out,
    channels,
    height,
    width,
    stride_c,
    stride_t,
    tiles_across,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [T * HALVES, C, 2H, 2W]: every pixel of x [HALVES * C, T, H, W] four times. Grid: (tiles, T * HALVES * C)."""
    row = tl.program_id(1).to(tl.int64)
    frame = row // channels
    channel = row % channels + (frame % HALVES) * channels
    tile = tl.program_id(0)
    rows = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < 2 * height) & (columns < 2 * width)
    source = x + channel * stride_c + (frame // HALVES) * stride_t
    value = tl.load(source + (rows // 2) * width + columns // 2, mask=inside)
    tl.store(out + row * 4 * height * width + rows * 2 * width + columns, value, mask=inside)


@triton.jit
def upsample_channels_last(
    x,
    bias,
    residual,
    out,
    height,
    width,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIXELS: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """out [T * HALVES, 2H, 2W, C]: every pixel of x + bias + residual [T, H, W, HALVES * C] four times. Grid: (tiles of
    pixels, T * HALVES)."""
    frame = tl.program_id(1).to(tl.int64)
    pixels = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    columns = tl.arange(0, COLUMNS)
    inside = (pixels < height * width)[:, None] & (columns < CHANNELS)[None, :]
    channels = (frame % HALVES) * CHANNELS + columns
    place = ((frame // HALVES) * height * width + pixels)[:, None] * (HALVES * CHANNELS) + channels[None, :]
    value = tl.load(x + place, mask=inside).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + channels, mask=columns < CHANNELS, other=0.0).to(tl.float32)[None, :]
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    result = value.to(out.dtype.element_ty)
    corner = frame * 4 * height * width + (pixels // width) * 4 * width + (pixels % width) * 2
    for down in tl.static_range(2):
        for right in tl.static_range(2):
            target = (corner + down * 2 * width + right)[:, None] * CHANNELS + columns[None, :]
            tl.store(out + target, result, mask=inside)


@triton.jit
def add_duplicated_channels_first(
    x,
    source,
    channels,
    height,
    width,
    stride_c,
    stride_t,
    tiles_across,
    FACTOR: tl.constexpr,
    REPEATS: tl.constexpr,
    DROPPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x [T, C, H, W] += the duplicated source [C', T', H / 2, W / 2]. Grid: (tiles, T * C)."""
    row = tl.program_id(1).to(tl.int64)
    frame = row // channels + DROPPED
    tile = tl.program_id(0)
    rows = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < height) & (columns < width)
    copies = ((row % channels) * FACTOR + frame % FACTOR) * 4 + (rows % 2) * 2 + columns % 2
    place = (copies // REPEATS) * stride_c + (frame // FACTOR) * stride_t + (rows // 2) * (width // 2) + columns // 2
    target = x + row * height * width + rows * width + columns
    value = tl.load(target, mask=inside).to(tl.float32) + tl.load(source + place, mask=inside).to(tl.float32)
    tl.store(target, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def add_duplicated_channels_last(
    x,
    source,
    bias,
    height,
    width,
    CHANNELS: tl.constexpr,
    SOURCE_CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIXELS: tl.constexpr,
    FACTOR: tl.constexpr,
    REPEATS: tl.constexpr,
    DROPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """x [T, H, W, C] += bias and the duplicated source [T', H / 2, W / 2, C']. Grid: (tiles of pixels, T)."""
    row = tl.program_id(1).to(tl.int64)
    frame = row + DROPPED
    pixels = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    columns = tl.arange(0, COLUMNS)
    inside = (pixels < height * width)[:, None] & (columns < CHANNELS)[None, :]
    rows = pixels // width
    across = pixels % width
    target = x + (row * height * width + pixels)[:, None] * CHANNELS + columns[None, :]
    value = tl.load(target, mask=inside).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)[None, :]
        value = value.to(x.dtype.element_ty).to(tl.float32)
    pixel = (frame // FACTOR) * (height // 2) * (width // 2) + (rows // 2) * (width // 2) + across // 2
    copies = (columns * FACTOR + frame % FACTOR)[None, :] * 4 + (rows % 2 * 2 + across % 2)[:, None]
    value += tl.load(source + pixel[:, None] * SOURCE_CHANNELS + copies // REPEATS, mask=inside).to(tl.float32)
    tl.store(target, value.to(x.dtype.element_ty), mask=inside)
