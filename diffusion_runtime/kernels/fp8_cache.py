"""Cached keys and values in 8 bits, read back: in Triton, which reads every code once, or in torch."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.kernels.implementation import refusal_of, runs_in_triton
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

# Tokens and numbers of a token that one program reads: 32 numbers per thread.
TOKENS = 8
COLUMNS = 512
NUM_WARPS = 4
_launches = LaunchCache()


def dequantise(
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    *,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """keys * scale[0] + mean and values * scale[1], each rounded once, in the dtype of `scale`.

    keys, values: codes of float8_e4m3fn as bytes (uint8), [batch, seq, heads, head_dim], none of them NaN. scale:
    [2, batch, 1, heads, 1]; mean: of the keys, [batch, 1, heads, head_dim]. Raises ConfigError for an implementation
    that cannot run.
    """
    if runs_in_triton(implementation, _refusal(keys, values, scale, mean)):
        return _dequantise_in_triton(keys, values, scale, mean)
    k, v = (codes.view(torch.float8_e4m3fn).to(scale.dtype) for codes in (keys, values))
    return torch.addcmul(mean, k, scale[0]), v.mul_(scale[1])


def _refusal(keys: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor) -> str | None:
    """Return why Triton cannot compute with such tensors, or None."""
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


def _dequantise_in_triton(
    keys: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out = scale.new_empty((2, *keys.shape))
    pointers = (keys, values, scale, mean, out)
    key: Hashable = tuple(kind_of(each) for each in pointers)

    def prepare() -> Launch:
        from diffusion_runtime.kernels import fp8_cache_triton as kernels

        batch, num_tokens, num_heads, head_dim = keys.shape
        width = num_heads * head_dim
        grid = (-(-num_tokens // TOKENS), -(-width // COLUMNS), 2 * batch)
        numbers = (batch, num_tokens, num_heads, width, keys.stride(0), values.stride(0))
        constants = {"HEAD_DIM": head_dim, "TOKENS": TOKENS, "COLUMNS": COLUMNS}
        return Launch(kernels.dequantise, grid, numbers, constants, NUM_WARPS)

    if out.numel():
        _launches.run(key, pointers, prepare)
    return out[0], out[1]
