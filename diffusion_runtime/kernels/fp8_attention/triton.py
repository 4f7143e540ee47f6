"""Attention in 8-bit floats on a GPU: Triton quantises in four launches, cuDNN attends, Triton restores the output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diffusion_runtime.kernels.block_packing import rows_contiguous
from diffusion_runtime.kernels.fp8_attention.cudnn_graph import run_graph
from diffusion_runtime.kernels.fp8_attention.reference import E4M3, QuantizedInputs, rotation

HEAD_SIZES = (64, 128)


@dataclass(frozen=True)
class LaunchShape:
    """programs: per head, that gather statistics, gather_rows tokens at a time; rows: tokens per program of what rounds
    and restores; warps of each."""

    programs: int = 64
    gather_rows: int = 32
    gather_warps: int = 4
    rows: int = 64
    warps: int = 4


@dataclass(frozen=True)
class Prepared:
    """The steps of one call, which may be called again: quantize writes inputs, attend out8 and lse, restore out."""

    inputs: QuantizedInputs
    out8: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    gather: Callable[[], None]
    round_inputs: Callable[[], None]
    attend: Callable[[], None]
    restore: Callable[[], None]

    def quantize(self) -> None:
        self.gather()
        self.round_inputs()


def fp8_attention_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, rotate: bool, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement fp8_attention_reference on a GPU, with lse if requested."""
    prepared = prepare(q, k, v, scale=scale, rotate=rotate, return_lse=return_lse)
    prepared.quantize()
    prepared.attend()
    prepared.restore()
    return prepared.out, prepared.lse


@functools.lru_cache(maxsize=16)
def rotation_on(device: torch.device, head_dim: int) -> torch.Tensor:
    """Return the rotation as the kernels read it: the interpreter multiplies the bit patterns of bfloat16."""
    return rotation(head_dim).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def empty_like_heads(x: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """Return e4m3 of x's sizes [batch, seq, heads, head_dim]; heads_first: in memory [batch, heads, seq, head_dim]."""
    batch, seq, heads, head_dim = x.shape
    if heads_first:
        return torch.empty(batch, heads, seq, head_dim, dtype=E4M3, device=x.device).transpose(1, 2)
    return torch.empty(x.shape, dtype=E4M3, device=x.device)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    rotate: bool,
    return_lse: bool,
    heads_first: bool = False,
    shape: LaunchShape | None = None,
) -> Prepared:
    """Everything that comes before the launches; arguments as in fp8_attention_triton. Long, because launches name all
    of the kernels' arguments."""
    import triton

    from diffusion_runtime.kernels.fp8_attention import triton_kernels as kernels

    shape = LaunchShape() if shape is None else shape
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, num_q, num_heads, head_dim = q.shape
    num_k, num_kv_heads = k.shape[1:3]
    repeats, rows, kv_rows = num_heads // num_kv_heads, batch * num_heads, batch * num_kv_heads
    device = q.device
    k_per_program, q_per_program = (_rounded_up(-(-x // shape.programs), shape.gather_rows) for x in (num_k, num_q))
    num_partial = max(-(-num_k // k_per_program), -(-num_q // q_per_program))
    partial = torch.empty(kv_rows, num_partial, 4, head_dim, device=device)
    partial_norms = torch.empty(kv_rows, num_partial, 2, device=device)
    means = torch.empty(2, batch, num_kv_heads, head_dim, device=device)
    v_scales = torch.empty(batch, num_kv_heads, head_dim, device=device)
    norms = torch.empty(2, kv_rows, device=device)
    descale = torch.empty(1, device=device)
    q8, k8, v8, out8 = (empty_like_heads(x, heads_first) for x in (q, k, v, q))
    lse = torch.empty(batch, num_heads, num_q, device=device) if return_lse else None
    biases = torch.empty_like(lse) if lse is not None else norms
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    turn = rotation_on(device, head_dim) if rotate else norms
    q_strides, k_strides, v_strides = (x.stride()[:3] for x in (q, k, v))
    heads = triton.next_power_of_2(kv_rows)

    def gather() -> None:
        kernels.gather_statistics[(num_partial, kv_rows)](
            *(q, k, v, partial, partial_norms, num_q, num_k),
            *(q_per_program, k_per_program, num_kv_heads),
            *(*q_strides, *k_strides, *v_strides),
            D=head_dim,
            ROWS=shape.gather_rows,
            REPEATS=repeats,
            num_warps=shape.gather_warps,
        )
        kernels.finish_statistics[(kv_rows,)](
            *(partial, partial_norms, means, v_scales, norms, num_partial, num_k),
            D=head_dim,
            PARTIAL=shape.programs,
            num_warps=8,
        )

    def round_inputs() -> None:
        kernels.quantize_queries[(triton.cdiv(num_q, shape.rows), rows)](
            *(q, turn, means, norms, q8, descale, biases, scale, num_q, num_heads, kv_rows),
            *(*q_strides, *q8.stride()[:3]),
            D=head_dim,
            ROWS=shape.rows,
            REPEATS=repeats,
            HEADS=heads,
            ROTATE=rotate,
            HAS_BIAS=return_lse,
            num_warps=shape.warps,
        )
        kernels.quantize_keys_and_values[(triton.cdiv(num_k, shape.rows), kv_rows)](
            *(k, v, turn, means, v_scales, norms, k8, v8, num_k, num_kv_heads, kv_rows),
            *(*k_strides, *v_strides, *k8.stride()[:3]),
            D=head_dim,
            ROWS=shape.rows,
            HEADS=heads,
            ROTATE=rotate,
            num_warps=shape.warps,
        )

    def attend() -> None:
        run_graph(q8, k8, v8, descale, out8, lse, scale)

    def restore() -> None:
        restore_output(out8, v_scales, means[1], out, shape)
        if lse is not None:
            lse.add_(biases)

    inputs = QuantizedInputs(q8, k8, v8, descale, means[0], means[1], v_scales)
    return Prepared(inputs, out8, out, lse, gather, round_inputs, attend, restore)


def restore_output(
    out8: torch.Tensor, v_scales: torch.Tensor, v_means: torch.Tensor, out: torch.Tensor, shape: LaunchShape
) -> None:
    """Write out = out8 * v_scales + v_means: [batch, seq, heads, head_dim], of kv heads [batch, kv_heads, head_dim]."""
    import triton

    from diffusion_runtime.kernels.fp8_attention import triton_kernels as kernels

    batch, num_tokens, num_heads, head_dim = out.shape
    kernels.restore_output[(triton.cdiv(num_tokens, shape.rows), batch * num_heads)](
        *(out8, v_scales, v_means, out, num_tokens, num_heads),
        *(*out8.stride()[:3], *out.stride()[:3]),
        D=head_dim,
        ROWS=shape.rows,
        REPEATS=num_heads // v_means.shape[1],
        num_warps=shape.warps,
    )


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
