"""Merging of split-KV attention: the choice of the implementation."""

from __future__ import annotations

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.implementation import runs_in_triton
from diffusion_runtime.kernels.split_kv import reference, triton


def merge_parts(
    partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, *, implementation: str = "auto"
) -> torch.Tensor:
    """Writes to `out` what attention to all keys is, and returns its log-sum-exp, float32, [batch, heads, seq].

    partial: attention to each part of the keys, [batch * parts, seq, heads, head_dim], the parts of a sample side by
    side. lse: float32, [batch * parts, heads, seq], natural log, -inf for rows that see no key of the part. out:
    [batch, seq, heads, head_dim] of any strides whose heads and numbers lie in a row. Flash-Decoding's reduction (Dao
    et al., 2023); the weights are those of the online softmax (arXiv:1805.02867). A row that sees no key of any part
    gets 0 and -inf.

    Raises ConfigError for shapes that do not fit, and for an implementation that cannot run.
    """
    batch, seq, heads, head_dim = out.shape
    num_parts = partial.shape[0] // max(batch, 1)
    if partial.shape != (batch * num_parts, seq, heads, head_dim) or lse.shape != (batch * num_parts, heads, seq):
        raise ConfigError(
            f"merge_parts: expected parts [{batch} * parts, {seq}, {heads}, {head_dim}] and their log-sum-exps "
            f"[{batch} * parts, {heads}, {seq}], got {list(partial.shape)} and {list(lse.shape)}"
        )
    if runs_in_triton(implementation, triton.refusal(partial, lse, out)):
        return triton.merge_parts(partial, lse, out)
    return reference.merge_parts(partial, lse, out)
