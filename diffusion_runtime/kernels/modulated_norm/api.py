"""Residual sum, norm and modulation (adaLN) in one pass: checks, and the choice of the implementation.

    x += gate * branch_norm(branch);  out = norm(x) * (1 + scale) + shift

Done one after the other these read and write x, and a float32 copy of it, up to six times; here once.
"""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_rows.api import quantize_rows
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.fp8_rows.triton import empty_rows
from diffusion_runtime.kernels.implementation import has_shape_alone, leaves_eager, runs_in_triton
from diffusion_runtime.kernels.modulated_norm import reference, triton
from diffusion_runtime.kernels.modulated_norm.reference import Branch as Branch
from diffusion_runtime.kernels.modulated_norm.reference import Norm as Norm
from diffusion_runtime.kernels.modulated_norm.reference import NormCall


def modulated_norm(
    x: torch.Tensor,
    norm: Norm,
    *,
    shift: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    branch: Branch | None = None,
    out: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift in x's dtype, after x += branch, which is written back to x and rounded once.

    x: [batch, seq, dim], which may be a slice of a wider tensor. shift, scale: [batch, dim]. out: a tensor like x to
    write into; None is a new one. implementation: `auto`, `reference` or `triton`; Triton computes in float32 and
    rounds the result once.

    Raises ConfigError for shapes that do not fit, and when the implementation that was asked for cannot run.
    """
    return _computed(NormCall(x, norm, shift, scale, branch, out), implementation)


def modulated_norm_fp8(
    x: torch.Tensor,
    norm: Norm,
    *,
    shift: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    branch: Branch | None = None,
    implementation: str = "auto",
) -> QuantizedRows:
    """quantize_rows(modulated_norm(...)) in the same pass and to the bit, [batch * seq, dim]: the input of fp8 linear
    layers.

    Raises ConfigError as modulated_norm does.
    """
    call = NormCall(x, norm, shift, scale, branch, None)
    if implementation == "auto":
        made = triton.repeat_fp8(call)
        if made is not None:
            return made
    _check(call)
    if has_shape_alone(x):
        return empty_rows(x, x.shape[0] * x.shape[1], x.shape[2])
    if runs_in_triton(implementation, triton.refusal(call) or triton.fp8_refusal(x.device)):
        return triton.modulated_norm_fp8(call)
    if implementation == "reference":
        return reference.modulated_norm_fp8(call)
    # Of the two passes each may still run in Triton.
    return quantize_rows(_computed(call, "auto"))


def add_branch_(x: torch.Tensor, branch: Branch, *, implementation: str = "auto") -> torch.Tensor:
    """x += branch: x [batch, seq, dim] is overwritten and returned; summed in float32, rounded once.

    Raises ConfigError as modulated_norm does.
    """
    return _computed(NormCall(x, None, None, None, branch, x), implementation)


def _computed(call: NormCall, implementation: str) -> torch.Tensor:
    if implementation == "auto":
        if leaves_eager(call.x, call.x.shape[2]):
            _check(call)
            return reference.modulated_norm(call)
        made = triton.repeat(call)
        if made is not None:
            return made
    _check(call)
    if has_shape_alone(call.x):
        out = torch.empty_like(call.x, memory_format=torch.contiguous_format) if call.out is None else call.out
        triton.expect(call, out)
        return out
    if runs_in_triton(implementation, triton.refusal(call)):
        return triton.modulated_norm(call)
    return reference.modulated_norm(call)


def _check(call: NormCall) -> None:
    x, norm, shift, scale, branch, out = call
    batch, _, dim = x.shape
    for row in (shift, scale, None if branch is None else branch.gate):
        if row is not None and row.shape != (batch, dim):
            raise ConfigError(
                f"modulation: expected rows of shift, scale and gate {(batch, dim)} for x {tuple(x.shape)}, got "
                f"{tuple(row.shape)}"
            )
    for whole in (None if branch is None else branch.values, out):
        if whole is not None and whole.shape != x.shape:
            raise ConfigError(
                f"modulated norm: expected branch and out like x {tuple(x.shape)}, got {tuple(whole.shape)}"
            )
    for each in (norm, None if branch is None else branch.norm):
        for vector in (each.weight, each.bias) if each is not None else ():
            if vector is not None and vector.shape != (dim,):
                raise ConfigError(f"norm: expected {dim} weights, got {tuple(vector.shape)}")
    if branch is not None and branch.norm is not None and (branch.norm.kind != "rms" or branch.norm.weight is None):
        raise ConfigError("norm of a branch: expected an RMSNorm with weight")
