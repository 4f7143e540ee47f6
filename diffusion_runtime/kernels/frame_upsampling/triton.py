"""Upsampling in Triton: each number is read once and written where it belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffusion_runtime.kernels.causal_conv.triton import tile_shape

if TYPE_CHECKING:
    from diffusion_runtime.kernels.frame_upsampling.reference import Duplication


def upsample_channels_first(x: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Implement api.upsample_channels_first in one launch."""
    from diffusion_runtime.kernels.frame_upsampling import triton_kernels as kernels

    _, channels, frames, height, width = x.shape
    halves = 2 if is_interleaved else 1
    out = x.new_empty(frames * halves, channels // halves, 2 * height, 2 * width)
    rows, columns = tile_shape(2 * width)
    tiles_across = -(-2 * width // columns)
    kernels.upsample_channels_first[(tiles_across * -(-2 * height // rows), out.shape[0] * out.shape[1])](
        x,
        out,
        out.shape[1],
        height,
        width,
        x.stride(1),
        x.stride(2),
        tiles_across,
        HALVES=halves,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


def upsample_channels_last(
    x: torch.Tensor, is_interleaved: bool, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Implement api.upsample_channels_last in one launch."""
    from diffusion_runtime.kernels.frame_upsampling import triton_kernels as kernels

    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    frames, height, width, channels = x.shape
    halves = 2 if is_interleaved else 1
    out = x.new_empty(frames * halves, 2 * height, 2 * width, channels // halves)
    columns = max(16, 1 << (out.shape[3] - 1).bit_length())
    pixels = max(1, 2048 // columns)
    kernels.upsample_channels_last[(-(-height * width // pixels), out.shape[0])](
        x,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        height,
        width,
        CHANNELS=out.shape[3],
        COLUMNS=columns,
        PIXELS=pixels,
        HALVES=halves,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )
    return out


def add_duplicated_channels_first(x: torch.Tensor, source: torch.Tensor, duplication: Duplication) -> torch.Tensor:
    """Implement api.add_duplicated_channels_first in one launch."""
    from diffusion_runtime.kernels.frame_upsampling import triton_kernels as kernels

    frames, channels, height, width = x.shape
    rows, columns = tile_shape(width)
    tiles_across = -(-width // columns)
    kernels.add_duplicated_channels_first[(tiles_across * -(-height // rows), frames * channels)](
        x,
        source,
        channels,
        height,
        width,
        source.stride(1),
        source.stride(2),
        tiles_across,
        FACTOR=duplication.frames_factor,
        REPEATS=duplication.repeats,
        DROPPED=duplication.num_dropped,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return x


def add_duplicated_channels_last(
    x: torch.Tensor, source: torch.Tensor, duplication: Duplication, bias: torch.Tensor | None
) -> torch.Tensor:
    """Implement api.add_duplicated_channels_last in one launch."""
    from diffusion_runtime.kernels.frame_upsampling import triton_kernels as kernels

    frames, height, width, channels = x.shape
    columns = max(16, 1 << (channels - 1).bit_length())
    pixels = max(1, 2048 // columns)
    kernels.add_duplicated_channels_last[(-(-height * width // pixels), frames)](
        x,
        source,
        x if bias is None else bias,
        height,
        width,
        CHANNELS=channels,
        SOURCE_CHANNELS=source.shape[3],
        COLUMNS=columns,
        PIXELS=pixels,
        FACTOR=duplication.frames_factor,
        REPEATS=duplication.repeats,
        DROPPED=duplication.num_dropped,
        HAS_BIAS=bias is not None,
        num_warps=4,
    )
    return x
