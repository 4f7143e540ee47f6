"""8-bit attention: int8 scores, values in 8 bits or float16; Triton on CUDA, the eager reference elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.int8_attention import triton
from diffusion_runtime.kernels.int8_attention.reference import LEVELS, int8_attention_reference

IMPLEMENTATIONS = ("reference", "triton")


class Int8Result(NamedTuple):
    """out: [batch, seq_q, heads, head_dim] in q's dtype; lse: natural log, float32, [batch, heads, seq_q], or None."""

    out: torch.Tensor
    lse: torch.Tensor | None
    implementation: str


def int8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    values: str = "int8",
    implementation: str = "auto",
) -> Int8Result:
    """Return softmax(scale q k^T) v in 8 bits; reference.py defines what is rounded.

    q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim], with at least one key; scale: None is
    1 / sqrt(head_dim). values: what the weights and v are rounded to: int8, fp8 (e4m3) or fp16. The relative error on
    normal inputs is below 0.02, with fp8 below 0.045. NaN and inf make the rows and heads that meet them NaN.
    implementation: `auto` is Triton where it can compute, else the reference.

    Raises ConfigError for shapes, values or an implementation that cannot be computed, and on inputs that record
    gradients, because rounding has none.
    """
    if q.dim() != 4 or k.shape != v.shape or k.shape[::3] != q.shape[::3] or k.shape[1] == 0 or q.shape[2] % k.shape[2]:
        raise ConfigError(
            "8-bit attention: expected q [batch, seq_q, heads, head_dim] and k, v [batch, seq_k, kv_heads, head_dim], "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if values not in LEVELS:
        raise ConfigError(f"8-bit attention: values: expected one of {', '.join(LEVELS)}, got {values!r}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ConfigError(
            "8-bit attention computes no gradients, and its inputs require them; call it under torch.no_grad()"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    reason = triton.refusal(q, values)
    if implementation not in ("auto", *IMPLEMENTATIONS) or (implementation == "triton" and reason is not None):
        raise ConfigError(f"8-bit attention cannot run as {implementation!r}: {reason or 'unknown'}; use auto")
    if implementation == "triton" or (implementation == "auto" and reason is None):
        out, lse = triton.int8_attention_triton(q, k, v, scale=scale, values=values, return_lse=return_lse)
        return Int8Result(out, lse, "triton")
    out, lse = int8_attention_reference(q, k, v, scale=scale, values=values, block=triton.tile_shape(q).block)
    return Int8Result(out, lse if return_lse else None, "reference")
