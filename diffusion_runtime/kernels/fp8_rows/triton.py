"""Row-wise quantisation in Triton: one read of the row, one write of a byte per number."""

from __future__ import annotations

import torch

from diffusion_runtime.device_guard import device_guard, guard_is_needed
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.implementation import refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

# Of one program, which keeps its row in registers.
MAX_DIM = 32768
_launches = LaunchCache()


def refusal(x: torch.Tensor) -> str | None:
    """Why tensors like x are not quantised by this implementation; None when they are."""
    reason = refusal_of(x)
    if reason is not None:
        return reason
    if x.is_cuda and (torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (8, 9)):
        return "needs a GPU of NVIDIA's of compute capability 8.9 or newer"
    if not 0 < x.shape[-1] <= MAX_DIM:
        return f"takes rows of 1 to {MAX_DIM} numbers, not {x.shape[-1]}"
    return None


def quantize_rows(x: torch.Tensor, *, gelu_from: int | None) -> QuantizedRows:
    """x: [rows, dim]."""
    if guard_is_needed(x.device):
        with device_guard(x.device):
            return quantize_rows(x, gelu_from=gelu_from)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, dim = x.shape
    values = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if not rows:
        return QuantizedRows(values, scales)

    def prepare() -> Launch:
        from diffusion_runtime.kernels.fp8_rows import triton_kernels as kernels

        block = 1 << (dim - 1).bit_length()
        constants = {"GELU": gelu_from is not None, "BLOCK": block}
        return Launch(
            kernels.quantize_rows,
            (rows, 1, 1),
            (dim, x.stride(0), gelu_from or 0),
            constants,
            4 if block <= 4096 else 8,
        )

    pointers = (x, values, scales)
    _launches.run((x.device, x.shape, gelu_from, *map(kind_of, pointers)), pointers, prepare)
    return QuantizedRows(values, scales)
