"""The specification of QK norm and rotary positions, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diffusion_runtime.kernels.modulated_norm.reference import rms_norm


class NormRopeCall(NamedTuple):
    """The arguments of one call, whose shapes are in api.py."""

    packed: torch.Tensor
    weights: Sequence[torch.Tensor]
    eps: float
    rotations: torch.Tensor | None
    mean_squares: torch.Tensor | None = None
    out: torch.Tensor | None = None


def norm_rope(call: NormRopeCall) -> tuple[torch.Tensor, ...]:
    """Implement api.norm_rope in torch."""
    packed, weights, eps, rotations, mean_squares, out = call
    parts = _parts(packed)
    for index, weight in enumerate(weights):
        x = parts[index]
        if mean_squares is not None:
            x = _scaled(x, weight, (mean_squares[:, :, index] + eps).rsqrt())
        else:
            x = rms_norm(x if len(weight) == x.shape[3] else x.flatten(2), weight, eps).view(x.shape)
        parts[index] = x if rotations is None else rotate(x, rotations)
    if out is None:
        return tuple(parts)
    return tuple(target.copy_(part) for target, part in zip(_parts(out), parts, strict=True))


def _scaled(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [batch, seq, heads, head_dim] times scale [batch, seq] and weight [heads * head_dim], in float32, rounded once;
    a float32 x is overwritten."""
    wide = x.float()
    if torch.compiler.is_dynamo_compiling():
        return (wide * scale[:, :, None, None] * weight.view(x.shape[2:])).to(x.dtype)
    return wide.mul_(scale[:, :, None, None]).mul_(weight.view(x.shape[2:])).to(x.dtype)


def _parts(packed: torch.Tensor) -> list[torch.Tensor]:
    """Split [batch, seq, parts, heads, head_dim] into views [batch, seq, heads, head_dim], one per part."""
    if torch.compiler.is_dynamo_compiling():
        # Writing into a result of unbind makes torch.compile take every size for a constant.
        return [packed.select(2, index) for index in range(packed.shape[2])]
    return list(packed.unbind(2))


def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """x [batch, seq, heads, head_dim] with its channel pairs turned by `rotations`, whose shapes are in api.py.

    As complex multiplication in float32: a single pass over x, 25 times quicker on a CPU than the four products written
    out on strided halves. A float32 `x` is overwritten and returned; another dtype gives a new tensor of that dtype.
    """
    if rotations.dim() < 4:
        rotations = rotations.unsqueeze(-2)
    if torch.compiler.is_dynamo_compiling():
        return rotate_by_parts(x, rotations)
    working = x.float()
    torch.view_as_complex(working.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(rotations)
    return working.to(x.dtype)


def rotate_by_parts(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate into a new tensor in real numbers: torch.compile generates no code for complex ones, and fuses these."""
    cosine, sine = torch.view_as_real(rotations).unbind(-1)
    real, imaginary = torch.unflatten(x.float(), -1, (x.shape[-1] // 2, 2)).unbind(-1)
    turned = torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], dim=-1)
    return turned.flatten(-2).to(x.dtype)
