"""SiLU of a normalised video in one pass: the norms of the HunyuanVideo and LTX decoders, and who computes them.

x is [1, channels, frames, height, width], contiguous, everywhere; the result has its shape and dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.norm_silu import triton

_HALF = (torch.float16, torch.bfloat16)


def rms_norm_silu(x: torch.Tensor, gamma: torch.Tensor, scale: float, *, is_exact: bool) -> torch.Tensor:
    """SiLU(x / its length over the channels * scale * gamma). gamma: [channels]; scale: the root of their number.

    is_exact: bit-identical to normalize, the two products, the sum with 0 and SiLU of torch on the same device, as
    torch sums the lengths; else they are summed in the same pass. Raises ConfigError for another number of weights.
    """
    _check(x, gamma)
    if triton.refusal(x) is None:
        return triton.rms_norm_silu(x, gamma, scale, is_exact)
    return rms_norm_silu_reference(x, gamma, scale)


def pixel_norm_silu(x: torch.Tensor, eps: float, *, is_exact: bool) -> torch.Tensor:
    """SiLU(x / sqrt(mean of x^2 over the channels + eps)). is_exact: bit-identical to torch's single operations in x's
    dtype; else the mean is summed in the same pass and nothing is rounded before the end."""
    if triton.refusal(x) is None:
        return triton.pixel_norm_silu(x, eps, is_exact)
    return pixel_norm_silu_reference(x, eps)


def group_norm_silu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """SiLU(group norm of x). weight, bias: [channels].

    Not bit-identical to torch on a GPU, which sums each group in one block of threads, in that block's order; here all
    multiprocessors sum, in float32 about each part's own mean. Raises ConfigError for another number of weights.
    """
    _check(x, weight)
    if x.shape[1] % num_groups:
        raise ConfigError(f"group norm: {x.shape[1]} channels do not make {num_groups} groups")
    if triton.refusal(x) is None:
        return triton.group_norm_silu(x, weight, bias, num_groups, eps)
    return group_norm_silu_reference(x, weight, bias, num_groups, eps)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.numel() != x.shape[1]:
        raise ConfigError(f"norm and SiLU: expected {x.shape[1]} norm weights, got {weight.numel()}")


def rms_norm_silu_reference(x: torch.Tensor, gamma: torch.Tensor, scale: float) -> torch.Tensor:
    """rms_norm_silu in torch, as diffusers' module computes it."""
    normalized = F.normalize(x.float() if x.dtype in _HALF else x, dim=1).to(x.dtype)
    # The sum turns -0 into 0, as the norm's absent bias does in diffusers.
    return F.silu(normalized * scale * gamma.view(-1, 1, 1, 1) + 0.0)


def pixel_norm_silu_reference(x: torch.Tensor, eps: float) -> torch.Tensor:
    """pixel_norm_silu in torch, as diffusers' module computes it."""
    return F.silu(x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + eps))


def group_norm_silu_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """group_norm_silu in torch, as diffusers' module computes it."""
    return F.silu(F.group_norm(x, num_groups, weight, bias, eps))
