"""Kernels that call the divisions of kernels/exact_division.py and nothing else, for a GPU."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diffusion_runtime.kernels.exact_division import _divide_rows, _silu_of_half


@triton.jit
def _silu(x, out, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + places, _silu_of_half(tl.load(x + places).to(tl.float32)).to(out.dtype.element_ty))


@triton.jit
def _divide(x, lengths, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + places, _divide_rows(tl.load(x + places).to(tl.float32), tl.load(lengths + rows)))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x: a multiple of 1024 numbers."""
    out = torch.empty_like(x)
    _silu[(x.numel() // 1024,)](x, out, BLOCK=1024)
    return out


def divide(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """x: [a multiple of 64, 64]. Returns float32."""
    out = torch.empty(x.shape, device=x.device)
    _divide[(len(x) // 64,)](x, lengths, out, ROWS=64, COLUMNS=64)
    return out
