"""Merging of split-KV attention: in Triton, one launch that reads every part once, or in torch."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.implementation import refusal_of, runs_in_triton
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

# Queries of one head that one program merges.
ROWS = 16
NUM_WARPS = 4
_launches = LaunchCache()


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
    if runs_in_triton(implementation, _refusal(partial, lse, out)):
        return _merge_parts_in_triton(partial, lse, out)
    return _merge_parts_reference(partial, lse, out)


def _merge_parts_reference(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    working = torch.promote_types(partial.dtype, torch.float32)
    batch = out.shape[0]
    by_part = lse.to(working).view(batch, -1, *lse.shape[1:])
    merged = torch.logsumexp(by_part, dim=1)
    # A row without keys, all of whose parts are 0; otherwise -inf minus -inf.
    weights = (by_part - merged.masked_fill(merged == -torch.inf, 0.0)[:, None]).exp()
    weighted = partial.to(working).view(batch, -1, *partial.shape[1:]) * weights.transpose(2, 3)[..., None]
    out.copy_(weighted.sum(dim=1))
    return merged.to(lse.dtype)


def _refusal(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> str | None:
    """Return why Triton cannot compute with such tensors, or None."""
    reason = refusal_of(partial, lse, out)
    if reason is not None:
        return reason
    if not (partial.is_contiguous() and lse.is_contiguous()):
        return "takes parts and log-sum-exps that lie in a row"
    if lse.dtype != torch.float32:
        return f"takes log-sum-exps in float32, not {lse.dtype}"
    if out.stride(2) != out.shape[3]:
        return "takes results whose heads lie in a row"
    return None


def _merge_parts_in_triton(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    batch, seq, heads, head_dim = out.shape
    merged = lse.new_empty(batch, heads, seq)
    pointers = (partial, lse, out, merged)
    key: Hashable = tuple(kind_of(each) for each in pointers)

    def prepare() -> Launch:
        from diffusion_runtime.kernels import split_kv_triton as kernels

        grid = (-(-seq // ROWS), heads, batch)
        numbers = (seq, heads, out.stride(0), out.stride(1))
        columns = 1 << (head_dim - 1).bit_length()
        constants = {
            "PARTS": partial.shape[0] // batch,
            "HEAD_DIM": head_dim,
            "ROWS": ROWS,
            "COLUMNS": columns,
        }
        return Launch(kernels.merge_parts, grid, numbers, constants, NUM_WARPS)

    if out.numel():
        _launches.run(key, pointers, prepare)
    return merged
