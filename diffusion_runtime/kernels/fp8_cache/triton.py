"""Reading keys and values in 8 bits in Triton: every code is read once, every number written once."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.kernels.implementation import refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

# Tokens and numbers of a token that one program reads: 32 numbers per thread.
TOKENS = 8
COLUMNS = 512
NUM_WARPS = 4
_launches = LaunchCache()


def refusal(keys: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor) -> str | None:
    """Why this implementation cannot compute with such tensors; None when it can."""
    reason = refusal_of(scale, mean)
    if reason is not None:
        return reason
    if not (scale.is_contiguous() and mean.is_contiguous()):
        return "takes scales and means that lie in a row"
    _, _, num_heads, head_dim = keys.shape
    for codes in (keys, values):
        if codes.stride()[1:] != (num_heads * head_dim, head_dim, 1):
            return "takes codes whose tokens lie in a row"
    return None


def dequantise(
    keys: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in api.py."""
    out = scale.new_empty((2, *keys.shape))
    pointers = (keys, values, scale, mean, out)
    key: Hashable = tuple(kind_of(each) for each in pointers)

    def prepare() -> Launch:
        from diffusion_runtime.kernels.fp8_cache import triton_kernels as kernels

        batch, num_tokens, num_heads, head_dim = keys.shape
        width = num_heads * head_dim
        grid = (-(-num_tokens // TOKENS), -(-width // COLUMNS), 2 * batch)
        numbers = (batch, num_tokens, num_heads, width, keys.stride(0), values.stride(0))
        constants = {"HEAD_DIM": head_dim, "TOKENS": TOKENS, "COLUMNS": COLUMNS}
        return Launch(kernels.dequantise, grid, numbers, constants, NUM_WARPS)

    if out.numel():
        _launches.run(key, pointers, prepare)
    return out[0], out[1]
