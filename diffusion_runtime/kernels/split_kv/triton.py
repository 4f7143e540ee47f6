"""Merging attention to parts of the keys in Triton: every part is read once, in one launch."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.kernels.implementation import refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

# Queries of one head that one program merges.
ROWS = 16
NUM_WARPS = 4
_launches = LaunchCache()


def refusal(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> str | None:
    """Why this implementation cannot compute with such tensors; None when it can."""
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


def merge_parts(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As in api.py."""
    batch, seq, heads, head_dim = out.shape
    merged = lse.new_empty(batch, heads, seq)
    pointers = (partial, lse, out, merged)
    key: Hashable = tuple(kind_of(each) for each in pointers)

    def prepare() -> Launch:
        from diffusion_runtime.kernels.split_kv import triton_kernels as kernels

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
