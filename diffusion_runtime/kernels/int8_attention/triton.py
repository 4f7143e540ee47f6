"""8-bit attention in Triton: quantising in four launches, then one for attention. CUDA from sm_80 on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.kernels.block_packing import rows_contiguous
from diffusion_runtime.kernels.block_sparse.triton import DTYPES, has_bulk_copies, is_interpreted
from diffusion_runtime.kernels.int8_attention.reference import LEVELS
from diffusion_runtime.startup.importing import import_failure

MINIMUM_CAPABILITY = (8, 0)
# Whose tensor cores take 8-bit floats.
_FP8_CAPABILITY = (8, 9)
HEAD_SIZES = (64, 128)
_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp16": torch.float16}
# Programs per head that add up tokens.
_PROGRAMS = 64


@dataclass(frozen=True)
class TileShape:
    """rows: queries per program; block: keys per step, which share a scale; the rest are compile options."""

    rows: int = 128
    block: int = 64
    num_warps: int = 8
    num_stages: int = 3
    bulk: bool = True
    ahead: bool = False


def refusal(q: torch.Tensor, values: str) -> str | None:
    """Return why tensors like q cannot be computed here, or None."""
    return refusal_of(detect_hardware(str(q.device)), q.shape[3], q.dtype, values)


def refusal_of(hardware: Hardware, head_dim: int, dtype: torch.dtype, values: str) -> str | None:
    """Return why such tensors cannot be computed here, by the properties that decide it, or None."""
    if head_dim not in HEAD_SIZES:
        return f"takes head sizes 64 and 128, not {head_dim}"
    if dtype not in DTYPES:
        return f"takes bfloat16, float16 and float32, not {dtype}"
    if is_interpreted():
        return None
    if hardware.platform != "cuda":
        return f"needs a CUDA GPU, the tensors are on {hardware.platform}"
    needed = _FP8_CAPABILITY if values == "fp8" else MINIMUM_CAPABILITY
    if hardware.capability is None or hardware.capability < needed:
        return f"needs sm_{needed[0]}{needed[1]} or newer for {values} values, this is {hardware.describe()}"
    failure = import_failure("triton")
    return None if failure is None else f"needs Triton: {failure}"


def tile_shape(q: torch.Tensor) -> TileShape:
    """Return the shape for tensors like q."""
    bulk = q.is_cuda and has_bulk_copies(detect_hardware(str(q.device)))
    if not bulk:
        return TileShape(64, 64, 4, 2, bulk=False)
    # On one H200, 32760 tokens, heads of 128: 10.5 ms for int8 values, where 128 x 64 with 8 warps takes 16.3
    # (benchmarks/results/int8_attention_gpu.json).
    return TileShape(64, 128, 4, 3, ahead=True)


@dataclass(frozen=True)
class Prepared:
    """quantize writes the 8-bit tensors, attend reads them and writes out and lse; both may be called again."""

    out: torch.Tensor
    lse: torch.Tensor | None
    quantize: Callable[[], None]
    attend: Callable[[], None]


def int8_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    values: str,
    return_lse: bool,
    shape: TileShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement int8_attention_reference in Triton, with lse if requested. shape: None selects tile_shape's."""
    prepared = prepare(q, k, v, scale=scale, values=values, return_lse=return_lse, shape=shape)
    prepared.quantize()
    prepared.attend()
    return prepared.out, prepared.lse


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    values: str,
    return_lse: bool,
    shape: TileShape | None = None,
) -> Prepared:
    """Everything that comes before the launches; arguments as in int8_attention_triton. Long, because launches name all
    of the kernels' arguments."""
    from diffusion_runtime.kernels.int8_attention import triton_kernels as kernels

    shape = tile_shape(q) if shape is None else shape
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, num_q, num_heads, head_dim = q.shape
    num_k, num_kv_heads = k.shape[1:3]
    rows, kv_rows = batch * num_heads, batch * num_kv_heads
    q_padded, k_padded = (_rounded_up(num_q, shape.rows), _rounded_up(num_k, shape.block))
    num_blocks = k_padded // shape.block
    device = q.device
    per_program = _rounded_up(-(-num_k // _PROGRAMS), 64)
    num_partial = -(-num_k // per_program)
    partial = torch.empty(kv_rows, num_partial, 4, head_dim, device=device)
    means = torch.empty(2, kv_rows, head_dim, device=device)
    v_scales = torch.empty(kv_rows, head_dim, device=device)
    q8 = torch.empty(rows * q_padded, head_dim, dtype=torch.int8, device=device)
    q_scales = torch.empty(rows, q_padded, device=device)
    biases = torch.empty_like(q_scales) if return_lse else q_scales
    k8 = torch.empty(kv_rows * k_padded, head_dim, dtype=torch.int8, device=device)
    k_scales = torch.empty(kv_rows, num_blocks, device=device)
    held = torch.empty(kv_rows * head_dim, k_padded, dtype=_TYPES[values], device=device)
    sums_shape = (kv_rows, num_blocks, head_dim) if values == "int8" else (1,)
    v_sums = torch.empty(sums_shape, dtype=torch.int32, device=device)
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = torch.empty(batch, num_heads, num_q, device=device) if return_lse else None
    weight_level, value_level = LEVELS[values]
    k_strides, v_strides, sizes = k.stride()[:3], v.stride()[:3], {"D": head_dim}

    def quantize() -> None:
        kernels.sum_tokens[(num_partial, kv_rows)](
            k, v, partial, num_k, per_program, num_kv_heads, *k_strides, *v_strides, **sizes, ROWS=64, num_warps=4
        )
        kernels.finish_sums[(kv_rows,)](
            partial, means, v_scales, num_partial, num_k, **sizes, PARTIAL=_PROGRAMS, LEVEL=value_level, num_warps=8
        )
        kernels.quantize_queries[(q_padded // min(64, shape.rows), rows)](
            *(q, means, q8, q_scales, biases, scale, num_q, q_padded, num_heads, num_heads // num_kv_heads),
            *q.stride()[:3],
            **sizes,
            ROWS=min(64, shape.rows),
            HAS_BIAS=return_lse,
            num_warps=4,
        )
        kernels.quantize_keys_and_values[(num_blocks, kv_rows)](
            *(k, v, means, v_scales, k8, k_scales, held, v_sums, num_k, k_padded, num_kv_heads),
            *k_strides,
            *v_strides,
            **sizes,
            BLOCK=shape.block,
            VALUES=values,
            num_warps=8,
        )

    def attend() -> None:
        kernels.attend[(q_padded // shape.rows, rows)](
            _tiles_of(q8, [shape.rows, head_dim], shape),
            _tiles_of(k8, [shape.block, head_dim], shape),
            _tiles_of(held, [head_dim, shape.block], shape),
            *(q_scales, k_scales, v_sums, v_scales, means[1], biases, out, out if lse is None else lse),
            *(num_q, num_k, q_padded, k_padded, num_heads, num_heads // num_kv_heads),
            *out.stride()[:3],
            **sizes,
            ROWS=shape.rows,
            BLOCK=shape.block,
            VALUES=values,
            LOG2_LEVEL=math.log2(weight_level),
            HAS_LSE=lse is not None,
            BULK=shape.bulk,
            AHEAD=shape.ahead,
            STAGES=shape.num_stages,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    return Prepared(out, lse, quantize, attend)


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _tiles_of(x: torch.Tensor, tile: list[int], shape: TileShape) -> Any:
    """Return the source from which the kernel loads tiles of a matrix: a descriptor, or the tensor."""
    if not shape.bulk:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), tile)
