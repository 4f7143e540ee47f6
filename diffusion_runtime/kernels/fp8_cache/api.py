"""Cached keys and values in 8 bits, read back: the choice of the implementation."""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.fp8_cache import reference, triton
from diffusion_runtime.kernels.implementation import runs_in_triton


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
    if runs_in_triton(implementation, triton.refusal(keys, values, scale, mean)):
        return triton.dequantise(keys, values, scale, mean)
    return reference.dequantise(keys, values, scale, mean)
