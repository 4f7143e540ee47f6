"""Input of a causal convolution over frames: the two frames before, the new ones normalised, in one buffer.

A decoder works on a video a few frames at a time. Each of its causal convolutions reads two frames before the new ones:
its history, [.., 2 frames, ..], zeros at the start. Every function here updates the history in place.
"""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.causal_conv import reference, triton
from diffusion_runtime.kernels.causal_conv.reference import NormSilu as NormSilu

HISTORY = 2  # Frames that a convolution over three frames reads before each new one.


def channels_first_input(
    x: torch.Tensor, history: torch.Tensor, norm: NormSilu | None, *, padding: int
) -> torch.Tensor:
    """History and new frames, padded with zeros in both directions of space.

    x: [1, channels, frames, height, width], planes contiguous. history: [1, channels, 2, height, width], contiguous.
    Returns [1, channels, frames + 2, height + 2 * padding, width + 2 * padding], contiguous. Bit-identical to
    normalize, multiply, SiLU, cat and pad of torch on the same device: roundings to x's dtype are where torch's are.

    Raises ConfigError for shapes that do not fit.
    """
    _check_history(x.shape[1:2] + x.shape[3:], history.shape[1:2] + history.shape[3:], history.shape[2], norm)
    if triton.refusal(x) is None and x.stride(4) == 1 and x.stride(3) == x.shape[4]:
        return triton.channels_first_input(x, history, norm, padding)
    return reference.channels_first_input(x, history, norm, padding)


def add_bias_residual(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """x + bias + residual, in place, rounded to x's dtype after each sum as torch does.

    x: [1, channels, frames, height, width], contiguous. residual: of the same shape, each plane contiguous.
    """
    if triton.refusal(x) is None and residual.stride(4) == 1 and residual.stride(3) == residual.shape[4]:
        return triton.add_bias_residual(x, bias, residual)
    return reference.add_bias_residual(x, bias, residual)


def channels_last_input(
    x: torch.Tensor,
    history: torch.Tensor,
    norm: NormSilu | None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_first: bool = False,
    in_torchs_order: bool = False,
) -> torch.Tensor:
    """History and the new frames, x + bias + residual normalised, rounded where torch would round.

    x, residual: [frames, height, width, channels]; the channels of a pixel are contiguous, pixels lie evenly apart.
    history: [2, height, width, channels], contiguous. Returns [frames + 2, height, width, channels]; without the
    history when `is_first`, which sets it to zeros first. With a residual, x becomes the sum, in place.
    in_torchs_order: the norm sums as torch's CUDA reduction does when the channels come first, to that one's bits; the
    reference sums as the torch that runs it.

    Raises ConfigError for shapes that do not fit.
    """
    _check_history(x.shape[3:] + x.shape[1:3], history.shape[3:] + history.shape[1:3], history.shape[0], norm)
    if triton.refusal(x) is None:
        return triton.channels_last_input(x, history, norm, bias, residual, is_first, in_torchs_order)
    return reference.channels_last_input(x, history, norm, bias, residual, is_first)


def _check_history(expected: torch.Size, found: torch.Size, num_frames: int, norm: NormSilu | None) -> None:
    """expected, found: (channels, height, width)."""
    if expected != found or num_frames != HISTORY:
        raise ConfigError(
            f"causal convolution: expected a history of {HISTORY} frames of (channels, height, width) "
            f"{tuple(expected)}, got {num_frames} of {tuple(found)}"
        )
    if norm is not None and norm.gamma.numel() != expected[0]:
        raise ConfigError(f"causal convolution: expected {expected[0]} norm weights, got {norm.gamma.numel()}")
