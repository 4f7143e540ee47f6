"""Residual sum, norm and modulation in Triton: one launch, one read and one write of every row."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.fp8_rows.triton import empty_rows
from diffusion_runtime.kernels.implementation import NEEDS_CUDA, may_run_on, refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, is_expecting, kind_of
from diffusion_runtime.kernels.modulated_norm.reference import NormCall

# Numbers of a row that one program holds in registers.
MAX_DIM = 8192
_launches = LaunchCache()


def refusal(call: NormCall) -> str | None:
    """Return why this implementation cannot compute such a call, or None."""
    x, norm, shift, scale, branch, out = call
    if not may_run_on(x.device):
        # First, since a CPU asks at every call.
        return NEEDS_CUDA
    tensors = [x, shift, scale, out]
    if norm is not None:
        tensors += [norm.weight, norm.bias]
    if branch is not None:
        tensors += [branch.values, branch.gate]
        if branch.norm is not None:
            tensors.append(branch.norm.weight)
    reason = refusal_of(*tensors)
    if reason is None and x.shape[2] > MAX_DIM:
        return f"takes rows of up to {MAX_DIM}, not {x.shape[2]}"
    if reason is None and x.shape[0] > 65535:
        return "takes up to 65535 samples"
    return reason


def fp8_refusal(device: torch.device) -> str | None:
    """Return why rows cannot be quantised to float8_e4m3fn on a device, or None."""
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 9)):
        return "needs a GPU with float8_e4m3fn, of compute capability 8.9 or newer"
    return None


def modulated_norm(call: NormCall) -> torch.Tensor:
    """Implement api.modulated_norm in one launch, and add_branch_ if the call has no norm."""
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format) if call.out is None else call.out
    _launch(call, out, None, "")
    return out


def expect(call: NormCall, out: torch.Tensor) -> None:
    """Add the launch of a call on the meta device to those that are expected, where they are asked for."""
    if is_expecting(call.x, call.x.shape[2]) and call.x.shape[2] <= MAX_DIM:
        _launch(call, out, None, "")


def modulated_norm_fp8(call: NormCall) -> QuantizedRows:
    """Implement api.modulated_norm_fp8 in one launch."""
    x = call.x
    rows = empty_rows(x, x.shape[0] * x.shape[1], x.shape[2])
    _launch(call, rows.values.view(x.shape), rows.scales, "fp8")
    return rows


def launch_shape(dim: int) -> tuple[int, int, int]:
    """(numbers of a row padded to a power of two, rows per program, warps): 32 numbers per thread."""
    block = max(64, 1 << (dim - 1).bit_length())
    rows = max(1, 2048 // block)
    return block, rows, max(1, min(16, block * rows // 1024))


def repeat(call: NormCall) -> torch.Tensor | None:
    """Return the result of a call like an earlier one, without its checks, or None for the first of its kind."""
    x, _, _, _, _, out = call
    found = _launches.repeat(x.device, _key, call, "")
    if found is None:
        return None
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    found.run(_pointers(call, out, None))
    return out


def repeat_fp8(call: NormCall) -> QuantizedRows | None:
    """Repeat a known launch of modulated_norm_fp8, as `repeat` does for modulated_norm."""
    x = call.x
    found = _launches.repeat(x.device, _key, call, "fp8")
    if found is None:
        return None
    rows = empty_rows(x, x.shape[0] * x.shape[1], x.shape[2])
    found.run(_pointers(call, rows.values, rows.scales))
    return rows


def _key(call: NormCall, form: str) -> Hashable:
    """Return all that checks and launch depend on. form: of the result's numbers."""
    x, norm, shift, scale, branch, out = call
    values, gate, branch_norm = (None, None, None) if branch is None else branch
    return (
        form,
        kind_of(x),
        None if norm is None else (norm.kind, norm.eps, kind_of(norm.weight), kind_of(norm.bias)),
        kind_of(shift),
        kind_of(scale),
        kind_of(values),
        kind_of(gate),
        None if branch_norm is None else (branch_norm.kind, branch_norm.eps, kind_of(branch_norm.weight)),
        "x" if out is x else kind_of(out),
    )


def _pointers(call: NormCall, out: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the pointers in the order of the kernel's arguments, x for each that it does not read."""
    x, norm, shift, scale, branch, _ = call
    values, gate, branch_norm = (None, None, None) if branch is None else branch
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return (
        x,
        x if values is None else values,
        out,
        x if scales is None else scales,
        x if gate is None else gate,
        x if branch_norm is None or branch_norm.weight is None else branch_norm.weight,
        x if weight is None else weight,
        x if bias is None else bias,
        x if scale is None else scale,
        x if shift is None else shift,
    )


def _launch(call: NormCall, out: torch.Tensor, scales: torch.Tensor | None, form: str) -> None:
    x, norm, shift, scale, branch, _ = call
    if x.numel() == 0:
        return
    values, gate, branch_norm = (None, None, None) if branch is None else branch
    branch_eps = 0.0 if branch_norm is None else branch_norm.eps
    kind, eps, weight, bias = ("none", 0.0, None, None) if norm is None else norm

    def prepare() -> Launch:
        from diffusion_runtime.kernels.modulated_norm import triton_kernels as kernels

        batch, num_tokens, dim = x.shape
        block, rows, num_warps = launch_shape(dim)
        strides = [(0, 0) if each is None else each.stride()[:2] for each in (x, values, out, gate, scale, shift)]
        numbers = (num_tokens, *strides[0], *strides[1], *strides[2], *(stride[0] for stride in strides[3:]))
        constants = {
            "KIND": kind,
            "HAS_BRANCH": values is not None,
            "HAS_GATE": gate is not None,
            "HAS_BRANCH_NORM": branch_norm is not None,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "HAS_SCALE": scale is not None,
            "HAS_SHIFT": shift is not None,
            "QUANTIZED": scales is not None,
            "DIM": dim,
            "BLOCK": block,
            "ROWS": rows,
        }
        grid = (-(-num_tokens // rows), batch, 1)
        return Launch(kernels.modulated_norm, grid, (*numbers, eps, branch_eps), constants, num_warps)

    _launches.run(_key(call, form), _pointers(call, out, scales), prepare)
