"""Attention in 8-bit floats: cuDNN's or FlashInfer's kernel between Triton's passes on CUDA, the eager reference
elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_attention import triton
from diffusion_runtime.kernels.fp8_attention.reference import fp8_attention_reference
from diffusion_runtime.kernels.fp8_attention.triton import Kernel


class Fp8Result(NamedTuple):
    """out: [batch, seq_q, heads, head_dim] in q's dtype; lse: natural log, float32, [batch, heads, seq_q], or None."""

    out: torch.Tensor
    lse: torch.Tensor | None
    implementation: str


def fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: Kernel = "cudnn",
) -> Fp8Result:
    """Return softmax(scale q k^T) v in 8-bit floats; reference.py defines what is rounded.

    q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim], with at least one query and one key;
    head_dim: 64 or 128; scale: None is 1 / sqrt(head_dim). kernel: what attends on a GPU; FlashInfer's output is not
    rounded to 8 bits. The relative error on normal inputs is 0.06. NaN and inf reach the results of their heads, those
    of queries and keys all results, as these share a scale.

    Raises ConfigError for shapes that cannot be computed, and on inputs that record gradients, because rounding has
    none; what cuDNN raises where a GPU has no kernel for the shape.
    """
    fits = q.dim() == 4 and k.shape == v.shape and k.shape[::3] == q.shape[::3] and k.shape[1] > 0
    if not fits or q.shape[2] % k.shape[2] or q.shape[3] not in triton.HEAD_SIZES:
        raise ConfigError(
            "attention in 8-bit floats: expected q [batch, seq_q, heads, head_dim] and k, v [batch, seq_k, kv_heads, "
            f"head_dim] with a head_dim of 64 or 128, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ConfigError(
            "attention in 8-bit floats computes no gradients, and its inputs require them; call it under "
            "torch.no_grad()"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if q.is_cuda:
        out, lse = triton.fp8_attention_triton(q, k, v, scale=scale, return_lse=return_lse, kernel=kernel)
        return Fp8Result(out, lse, kernel)
    out, lse = fp8_attention_reference(q, k, v, scale=scale)
    return Fp8Result(out, lse if return_lse else None, "reference")
