"""Norm and SiLU in Triton: x is read once for the sums and once for the result."""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.causal_conv.triton import refusal as refused_tensor

# Numbers that a program sums or writes: 8 rows of channels by 128 pixels, or one row of 4096.
_ROWS, _PIXELS = 8, 128
_BLOCK = 4096
# Parts that a group is summed in: 32 groups of 64 parts fill a GPU of 132 multiprocessors more than ten times over.
_PARTS = 64


def refusal(x: torch.Tensor) -> str | None:
    """Return why this implementation cannot compute with tensors like x, or None."""
    if x.dim() != 5 or x.shape[0] != 1 or not x.is_contiguous():
        return "takes one contiguous sample, [1, channels, frames, height, width]"
    return refused_tensor(x)


def rms_norm_silu(x: torch.Tensor, gamma: torch.Tensor, scale: float, is_exact: bool) -> torch.Tensor:
    """Implement api.rms_norm_silu in Triton."""
    lengths = torch.linalg.vector_norm(x, 2, dim=1, keepdim=True, dtype=torch.float32) if is_exact else None
    return _by_pixel(x, lengths, gamma.contiguous(), scale, 0.0)


def pixel_norm_silu(x: torch.Tensor, eps: float, is_exact: bool) -> torch.Tensor:
    """Implement api.pixel_norm_silu in Triton."""
    means = torch.mean(x**2, dim=1, keepdim=True) if is_exact else None
    return _by_pixel(x, means, None, 1.0, eps)


def _by_pixel(
    x: torch.Tensor, sums: torch.Tensor | None, gamma: torch.Tensor | None, scale: float, eps: float
) -> torch.Tensor:
    from diffusion_runtime.kernels.norm_silu import triton_kernels as kernels

    channels, num_pixels = x.shape[1], x[0, 0].numel()
    out = torch.empty_like(x)
    kernels.norm_silu_by_pixel[(-(-num_pixels // _PIXELS),)](
        x,
        x if sums is None else sums.contiguous(),
        x if gamma is None else gamma,
        out,
        num_pixels,
        scale,
        eps,
        CHANNELS=channels,
        HAS_SUMS=sums is not None,
        IS_RMS=gamma is not None,
        LIBDEVICE=x.is_cuda,
        ROWS=_ROWS,
        PIXELS=_PIXELS,
        num_warps=4,
    )
    return out


def group_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """Implement api.group_norm_silu. Parts (a few thousand) are merged in float64 (Chan, Golub and LeVeque 1983)."""
    from diffusion_runtime.kernels.norm_silu import triton_kernels as kernels

    channels, num_pixels = x.shape[1], x[0, 0].numel()
    size = channels // num_groups * num_pixels
    part = -(-size // (_PARTS * _BLOCK)) * _BLOCK
    num_parts = -(-size // part)
    moments = x.new_empty(2, num_groups, num_parts, dtype=torch.float32)
    kernels.moments_of_parts[(num_parts, num_groups)](
        x, moments, size, part, num_parts, num_groups * num_parts, BLOCK=_BLOCK, num_warps=8
    )
    means, squares = moments.double()
    counts = torch.full((num_parts,), part, dtype=torch.float64, device=x.device)
    counts[-1] = size - part * (num_parts - 1)
    mean = (means * counts).sum(1, keepdim=True) / size
    variance = (squares.sum(1) + ((means - mean).square() * counts).sum(1)) / size
    by_channel = torch.stack([mean[:, 0], (variance + eps).rsqrt()]).repeat_interleave(channels // num_groups, dim=1)
    factor = (by_channel[1] * weight.double()).float()
    out = torch.empty_like(x)
    kernels.group_norm_silu[(-(-num_pixels // _BLOCK), channels)](
        x, by_channel[0].float(), factor, bias, out, num_pixels, LIBDEVICE=x.is_cuda, BLOCK=_BLOCK, num_warps=8
    )
    return out
