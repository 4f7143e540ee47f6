"""The specification of residual sum, norm and modulation, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm

FP8_MAX = 448.0  # Of float8_e4m3fn.
SMALLEST_MAXIMUM = 1e-12  # Of a row, so that a row of zeros has a scale.


def modulated_norm(
    x: torch.Tensor,
    norm: Norm,
    shift: torch.Tensor | None,
    scale: torch.Tensor | None,
    branch: Branch | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """As in api.py."""
    if branch is not None:
        add_branch_(x, branch)
    result = _layer_norm(x, norm, shift, scale) if norm.kind == "layer" else _rms_norm(x, norm, shift, scale)
    return result if out is None else out.copy_(result)


def modulated_norm_fp8(
    x: torch.Tensor,
    norm: Norm,
    shift: torch.Tensor | None,
    scale: torch.Tensor | None,
    branch: Branch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in api.py."""
    if branch is not None:
        add_branch_(x, branch)
    values = modulated_norm(x.float(), norm, shift, scale, None, None).flatten(0, 1)
    scales = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAXIMUM) / FP8_MAX
    return (values / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def add_branch_(x: torch.Tensor, branch: Branch) -> torch.Tensor:
    """As in api.py."""
    values, gate, norm = branch
    if norm is not None:
        assert norm.weight is not None
        values = rms_norm(values, norm.weight, norm.eps)
    return x.add_(values) if gate is None else x.addcmul_(values, gate[:, None])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., dim]. A float32 `x` is overwritten and returned; another dtype gives a new tensor."""
    if x.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # In place and without a temporary of x's size: most of the cost of torch's own on a CPU is page faults.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x.mul_(scale).mul_(weight)


def _layer_norm(x: torch.Tensor, norm: Norm, shift: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
    size = x.shape[-1:]
    if shift is None:
        normalized = F.layer_norm(x.float(), size, norm.weight, norm.bias, norm.eps)
        return (normalized if scale is None else normalized.mul_((scale + 1.0)[:, None])).to(x.dtype)
    scale = torch.ones_like(shift) if scale is None else scale + 1.0
    if x.shape[0] == 1 and norm.weight is None and norm.bias is None:
        # One sample: scale and shift are the weight and bias of a layer norm, so one pass does it all.
        return F.layer_norm(x.float(), size, scale[0], shift[0], norm.eps).to(x.dtype)
    normalized = F.layer_norm(x.float(), size, norm.weight, norm.bias, norm.eps)
    return normalized.mul_(scale[:, None]).add_(shift[:, None]).to(x.dtype)


def _rms_norm(x: torch.Tensor, norm: Norm, shift: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
    """Norm and modulation are computed in float32, and each is rounded once: two passes over x in its own dtype take a
    third of the memory traffic of float32 in between."""
    normalized = F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    if shift is not None:
        scale = torch.ones_like(shift) if scale is None else scale + 1.0
        return torch.addcmul(shift[:, None], normalized, scale[:, None], out=normalized)
    return normalized if scale is None else normalized.mul_((scale + 1)[:, None])
