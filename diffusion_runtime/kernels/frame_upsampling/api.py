"""Nearest-neighbour upsampling of frames, and the shortcut that repeats channels: the choice of the implementation."""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.causal_conv.triton import refusal
from diffusion_runtime.kernels.frame_upsampling import reference, triton
from diffusion_runtime.kernels.frame_upsampling.reference import Duplication as Duplication


def upsample_channels_first(x: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """x: [1, channels, frames, height, width], planes contiguous. Returns [frames, channels, 2 * height, 2 * width].

    is_interleaved: the channels are two halves, which become alternate frames: [2 * frames, channels / 2, ..].
    """
    if refusal(x) is None and x.stride(4) == 1 and x.stride(3) == x.shape[4]:
        return triton.upsample_channels_first(x, is_interleaved)
    return reference.upsample_channels_first(x, is_interleaved)


def upsample_channels_last(
    x: torch.Tensor, *, is_interleaved: bool, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Upsample x + bias + residual in the same way for [frames, height, width, channels], contiguous."""
    if refusal(x) is None:
        return triton.upsample_channels_last(x, is_interleaved, bias, residual)
    return reference.upsample_channels_last(x, is_interleaved, bias, residual)


def add_duplicated_channels_first(x: torch.Tensor, source: torch.Tensor, duplication: Duplication) -> torch.Tensor:
    """x + duplicated source, in place.

    x: [frames, channels, height, width], contiguous. source: [1, channels', frames', height / 2, width / 2], planes
    contiguous.
    """
    if refusal(x) is None and source.stride(4) == 1 and source.stride(3) == source.shape[4]:
        return triton.add_duplicated_channels_first(x, source, duplication)
    return reference.add_duplicated_channels_first(x, source, duplication)


def add_duplicated_channels_last(
    x: torch.Tensor, source: torch.Tensor, duplication: Duplication, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x + bias + duplicated source, in place, for [frames, height, width, channels], contiguous."""
    if refusal(x) is None:
        return triton.add_duplicated_channels_last(x, source, duplication, bias)
    return reference.add_duplicated_channels_last(x, source, duplication, bias)
