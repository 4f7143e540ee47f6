"""The specification of residual sum, norm and modulation, in torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows, quantize_rows


class Norm(NamedTuple):
    """kind: layer (Ba et al., arXiv:1607.06450) or rms (Zhang and Sennrich, arXiv:1910.07467); statistics are float32.
    weight, bias: [dim]; an RMSNorm has no bias."""

    kind: Literal["layer", "rms"]
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class Branch(NamedTuple):
    """Term added to the residual stream: gate * norm(values), computed in float32.

    values: [batch, seq, dim], which may be overwritten. gate: [batch, dim]; None is 1. norm: an RMSNorm with weight.
    """

    values: torch.Tensor
    gate: torch.Tensor | None = None
    norm: Norm | None = None


class NormCall(NamedTuple):
    """The arguments of one call, whose shapes are in api.py. norm: None for the sum alone, whose `out` is x."""

    x: torch.Tensor
    norm: Norm | None
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    branch: Branch | None = None
    out: torch.Tensor | None = None


def modulated_norm(call: NormCall) -> torch.Tensor:
    """Implement api.modulated_norm in torch."""
    x, norm, shift, scale, branch, out = call
    if branch is not None:
        add_branch_(x, branch)
    if norm is None:
        return x
    result = _layer_norm(x, norm, shift, scale) if norm.kind == "layer" else _rms_norm(x, norm, shift, scale)
    return result if out is None else out.copy_(result)


def modulated_norm_fp8(call: NormCall) -> QuantizedRows:
    """Implement api.modulated_norm_fp8 in two passes; the norm is rounded to x's dtype in between."""
    return quantize_rows(modulated_norm(call).flatten(0, 1))


def add_branch_(x: torch.Tensor, branch: Branch) -> torch.Tensor:
    """Implement api.add_branch_ in torch."""
    values, gate, norm = branch
    if norm is not None:
        assert norm.weight is not None
        values = rms_norm(values, norm.weight, norm.eps)
    return x.add_(values) if gate is None else x.addcmul_(values, gate.float()[:, None])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., dim]. A float32 `x` is overwritten and returned; another dtype, or torch.compile, gives a new tensor."""
    if x.dtype != torch.float32 or torch.compiler.is_dynamo_compiling():
        return _torch_rms_norm(x, weight, eps)
    # In place and without a temporary of x's size: most of the cost of torch's own on a CPU is page faults.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x.mul_(scale).mul_(weight)


def _layer_norm(x: torch.Tensor, norm: Norm, shift: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
    size = x.shape[-1:]
    if shift is None:
        normalized = F.layer_norm(x.float(), size, norm.weight, norm.bias, norm.eps)
        return (normalized if scale is None else normalized.mul_((scale + 1.0)[:, None])).to(x.dtype)
    # Rows may come in x's dtype, as a model's own product makes them.
    shift = shift.float()
    scale = torch.ones_like(shift) if scale is None else scale.float() + 1.0
    if x.shape[0] == 1 and norm.weight is None and norm.bias is None:
        # One sample: scale and shift are the weight and bias of a layer norm, so one pass does it all.
        return F.layer_norm(x.float(), size, scale[0], shift[0], norm.eps).to(x.dtype)
    normalized = F.layer_norm(x.float(), size, norm.weight, norm.bias, norm.eps)
    return normalized.mul_(scale[:, None]).add_(shift[:, None]).to(x.dtype)


def _rms_norm(x: torch.Tensor, norm: Norm, shift: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
    """Norm and modulation are computed in float32, and each is rounded once: two passes over x in its own dtype take a
    third of the memory traffic of float32 in between."""
    normalized = _torch_rms_norm(x, norm.weight, norm.eps)
    if shift is not None:
        scale = torch.ones_like(shift) if scale is None else scale + 1.0
        return torch.addcmul(shift[:, None], normalized, scale[:, None], out=normalized)
    return normalized if scale is None else normalized.mul_((scale + 1)[:, None])


def _torch_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return a new tensor of x's dtype; weights of another dtype multiply in float32."""
    size = x.shape[-1:]
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, size, weight, eps)
    return F.rms_norm(x.float(), size, weight.float(), eps).to(x.dtype)
