"""A causal convolution's input in Triton: one pass over the new frames, which also writes the history."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffusion_runtime.kernels.causal_conv.reference import NormSilu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(x: torch.Tensor) -> str | None:
    """Return why this implementation cannot compute with tensors like x, or None."""
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the tensor is on {x.device}"
    if x.dtype not in DTYPES:
        return f"takes bfloat16, float16 and float32, not {x.dtype}"
    return None


def channels_first_input(x: torch.Tensor, history: torch.Tensor, norm: NormSilu | None, padding: int) -> torch.Tensor:
    """Implement api.channels_first_input. The lengths of the channel vectors are torch's own reduction, since its order
    of summation determines the bits."""
    from diffusion_runtime.kernels.causal_conv import triton_kernels as kernels

    _, channels, frames, height, width = x.shape
    out = x.new_empty(1, channels, frames + 2, height + 2 * padding, width + 2 * padding)
    lengths = x if norm is None else torch.linalg.vector_norm(x, 2, dim=1, keepdim=True, dtype=torch.float32)
    rows, columns = tile_shape(out.shape[4])
    tiles_across = -(-out.shape[4] // columns)
    kernels.channels_first_input[(channels, tiles_across * -(-out.shape[3] // rows))](
        x,
        lengths.contiguous() if norm is not None else x,
        x if norm is None else norm.gamma,
        history,
        out,
        height,
        width,
        x.stride(1),
        x.stride(2),
        tiles_across,
        0.0 if norm is None else norm.scale,
        FRAMES=frames,
        PADDING=padding,
        NORM=norm is not None,
        LIBDEVICE=x.is_cuda,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


def add_bias_residual(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """Implement api.add_bias_residual in one launch."""
    from diffusion_runtime.kernels.causal_conv import triton_kernels as kernels

    _, channels, frames, height, width = x.shape
    block = 1024
    kernels.add_bias_residual[(-(-height * width // block), channels * frames)](
        x,
        x if bias is None else bias,
        residual,
        frames,
        height * width,
        residual.stride(1),
        residual.stride(2),
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=4,
    )
    return x


def channels_last_input(
    x: torch.Tensor,
    history: torch.Tensor,
    norm: NormSilu | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    is_first: bool,
    in_torchs_order: bool = False,
) -> torch.Tensor:
    """Implement api.channels_last_input. Torch's summation order is known for multiples of 16 channels from 64 on."""
    from diffusion_runtime.kernels.causal_conv import triton_kernels as kernels

    frames, height, width, channels = x.shape
    out = x.new_empty(frames + (0 if is_first else 2), height, width, channels)
    columns = max(16, 1 << (channels - 1).bit_length())
    pixels = max(16, 4096 // columns)
    kernels.channels_last_input[(-(-height * width // pixels),)](
        x,
        x if bias is None else bias,
        x if residual is None else residual,
        x if norm is None else norm.gamma,
        history,
        out,
        height * width,
        0.0 if norm is None else norm.scale,
        x.stride(2),
        channels if residual is None else residual.stride(2),
        CHANNELS=channels,
        COLUMNS=columns,
        PIXELS=pixels,
        FRAMES=frames,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        NORM=norm is not None,
        IS_FIRST=is_first,
        TORCHS_ORDER=in_torchs_order and channels % 16 == 0 and channels >= 64,
        LIBDEVICE=x.is_cuda,
        num_warps=4,
    )
    return out


def tile_shape(width: int) -> tuple[int, int]:
    """Rows and columns of the tiles that cover a plane, 1024 numbers in all."""
    columns = min(128, max(16, 1 << (width - 1).bit_length()))
    return 1024 // columns, columns
