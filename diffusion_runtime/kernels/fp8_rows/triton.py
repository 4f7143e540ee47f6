"""Row-wise quantisation in Triton: one read of the row, one write of a byte per number."""

from __future__ import annotations

import os

import torch

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of one program, which keeps its row in registers.
MAX_DIM = 32768


def refusal(x: torch.Tensor) -> str | None:
    """Why tensors like x are not quantised by this implementation; None when they are."""
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the tensor is on {x.device}"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return "needs a GPU of compute capability 8.9 or newer"
    if x.dtype not in DTYPES:
        return f"takes bfloat16, float16 and float32, not {x.dtype}"
    if not 0 < x.shape[-1] <= MAX_DIM:
        return f"takes rows of 1 to {MAX_DIM} numbers, not {x.shape[-1]}"
    return None


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """x: [rows, dim]."""
    from diffusion_runtime.kernels.fp8_rows import triton_kernels as kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    rows, dim = x.shape
    values = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = 1 << (dim - 1).bit_length()
        kernels.quantize_rows[(rows,)](
            x, values, scales, dim, x.stride(0), BLOCK=block, num_warps=4 if block <= 4096 else 8
        )
    return QuantizedRows(values, scales)
