"""Attention in 8-bit floats on a GPU: Triton quantises in four launches, cuDNN or FlashInfer attends, Triton restores
the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from diffusion_runtime.kernels.block_packing import rows_contiguous
from diffusion_runtime.kernels.fp8_attention import flashinfer_kernel
from diffusion_runtime.kernels.fp8_attention.cudnn_graph import GraphForm, run_graph
from diffusion_runtime.kernels.fp8_attention.reference import E4M3, QuantizedInputs
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of

HEAD_SIZES = (64, 128)
# What attends.
Kernel: TypeAlias = Literal["cudnn", "flashinfer"]
# Floats of a launch's tensors begin at multiples of 16 bytes.
_FLOATS_PER_UNIT = 4


@dataclass(frozen=True)
class LaunchShape:
    """programs: per head, that gather statistics, gather_rows tokens at a time, gather_stages of them on their way;
    rows: tokens at a time of what rounds and restores; tiles: so many times rows per program of what rounds, which
    reads the rotation once; warps of each."""

    programs: int = 64
    gather_rows: int = 16
    gather_warps: int = 4
    gather_stages: int = 4
    rows: int = 64
    tiles: int = 4
    warps: int = 4


DEFAULT_SHAPE = LaunchShape()


@dataclass(frozen=True)
class Prepared:
    """The steps of one call, which may be called again: gather and round_inputs write what `inputs` returns, attend
    lse, and restore what attend has returned into out."""

    out: torch.Tensor
    lse: torch.Tensor | None
    inputs: Callable[[], QuantizedInputs]
    gather: Callable[[], None]
    round_inputs: Callable[[], None]
    attend: Callable[[], torch.Tensor]
    restore: Callable[[torch.Tensor], None]


def fp8_attention_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, return_lse: bool, kernel: Kernel = "cudnn"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement fp8_attention_reference on a GPU, with lse if requested."""
    if q.shape[1] == 1 and kernel == "cudnn":
        # It has no kernel for one query on sm_90.
        out, lse = fp8_attention_triton(q.expand(-1, 2, -1, -1), k, v, scale=scale, return_lse=return_lse)
        return out[:, :1], None if lse is None else lse[..., :1]
    prepared = prepare(q, k, v, scale=scale, return_lse=return_lse, kernel=kernel)
    prepared.gather()
    prepared.round_inputs()
    prepared.restore(prepared.attend())
    return prepared.out, prepared.lse


_gather, _finish, _round_queries, _round_keys_and_values, _restore = (LaunchCache() for _ in range(5))


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    return_lse: bool,
    kernel: Kernel = "cudnn",
    shape: LaunchShape = DEFAULT_SHAPE,
) -> Prepared:
    """Everything that comes before the launches; arguments as in fp8_attention_triton. Long, because launches name all
    of the kernels' arguments."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, num_q, num_heads, head_dim = q.shape
    num_k, num_kv_heads = k.shape[1:3]
    repeats, rows, kv_rows = num_heads // num_kv_heads, batch * num_heads, batch * num_kv_heads
    device = q.device
    k_per_program, q_per_program = (_rounded_up(-(-x // shape.programs), shape.gather_rows) for x in (num_k, num_q))
    num_partial = max(-(-num_k // k_per_program), -(-num_q // q_per_program))
    # One allocation of all floats: partial, partial_norms, means, v_scales, norms, scales, biases.
    of_partial, of_means = kv_rows * num_partial, kv_rows * head_dim
    needed = [of_partial * 4 * head_dim, of_partial * 2, 2 * of_means, of_means, 2 * kv_rows, 16]
    sizes = [_rounded_up(size, _FLOATS_PER_UNIT) for size in (*needed, rows * num_q if return_lse else 0)]
    floats = torch.split_with_sizes(torch.empty(sum(sizes), device=device), sizes)
    partial, partial_norms, means, v_scales, norms, scales, biases = floats
    q8, k8, v8 = (torch.empty(x.shape, dtype=E4M3, device=device) for x in (q, k, v))
    lse = torch.empty(batch, num_heads, num_q, device=device) if return_lse else None
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    form = GraphForm(q.get_device(), batch, num_q, num_k, num_heads, num_kv_heads, head_dim, scale, return_lse)
    key = form, kind_of(q), kind_of(k), kind_of(v), shape

    def gather() -> None:
        _gather.run(
            key,
            (q, k, v, partial, partial_norms),
            lambda: Launch(
                _kernels().gather_statistics,
                (num_partial, kv_rows, 2),
                (num_q, num_k, q_per_program, k_per_program, num_kv_heads, *_strides(q), *_strides(k), *_strides(v)),
                {"D": head_dim, "ROWS": shape.gather_rows, "REPEATS": repeats, "STAGES": shape.gather_stages},
                shape.gather_warps,
            ),
        )
        _finish.run(
            key,
            (partial, partial_norms, means, v_scales, norms),
            lambda: Launch(
                _kernels().finish_statistics,
                (kv_rows, 1, 1),
                (num_partial, num_k),
                {"D": head_dim, "PARTIAL": shape.programs},
                8,
            ),
        )

    def round_inputs() -> None:
        per_program = shape.rows * shape.tiles
        heads = 1 << max(1, (kv_rows - 1).bit_length())
        _round_queries.run(
            key,
            (q, means, norms, q8, scales, biases if return_lse else norms),
            lambda: Launch(
                _kernels().quantize_queries,
                (-(-num_q // per_program), rows, 1),
                (scale, num_q, num_heads, kv_rows, *_strides(q), *_strides(q8)),
                {
                    "D": head_dim,
                    "ROWS": shape.rows,
                    "TILES": shape.tiles,
                    "REPEATS": repeats,
                    "HEADS": heads,
                    "HAS_BIAS": return_lse,
                    "DTYPE": _product_dtype(device),
                },
                shape.warps,
            ),
        )
        _round_keys_and_values.run(
            key,
            (k, v, means, v_scales, norms, k8, v8),
            lambda: Launch(
                _kernels().quantize_keys_and_values,
                (-(-num_k // per_program), kv_rows, 1),
                (num_k, num_kv_heads, kv_rows, *_strides(k), *_strides(v), *_strides(k8)),
                {
                    "D": head_dim,
                    "ROWS": shape.rows,
                    "TILES": shape.tiles,
                    "HEADS": heads,
                    "DTYPE": _product_dtype(device),
                },
                shape.warps,
            ),
        )

    def attend() -> torch.Tensor:
        if kernel == "flashinfer":
            return flashinfer_kernel.attend(q8, k8, v8, scales[:1], scale, lse)
        out8 = torch.empty(q.shape, dtype=E4M3, device=device)
        run_graph(form, q8, k8, v8, scales, out8, lse)
        return out8

    def restore(attended: torch.Tensor) -> None:
        _restore.run(
            (key, attended.dtype),
            (attended, v_scales, means, out),
            lambda: Launch(
                _kernels().restore_output,
                (-(-num_q // shape.rows), rows, 1),
                (num_q, num_heads, kv_rows, *_strides(attended), *_strides(out)),
                {"D": head_dim, "ROWS": shape.rows, "REPEATS": repeats},
                shape.warps,
            ),
        )
        if lse is not None:
            lse.add_(biases[: lse.numel()].view_as(lse))

    def inputs() -> QuantizedInputs:
        k_mean, v_mean = means[: 2 * of_means].view(2, batch, num_kv_heads, head_dim)
        return QuantizedInputs(
            q8, k8, v8, scales[:1], k_mean, v_mean, v_scales[:of_means].view(batch, num_kv_heads, head_dim)
        )

    return Prepared(out, lse, inputs, gather, round_inputs, attend, restore)


def _kernels() -> Any:
    from diffusion_runtime.kernels.fp8_attention import triton_kernels

    return triton_kernels


def _product_dtype(device: torch.device) -> Any:
    """Return the type in which the rotation is multiplied: the interpreter multiplies the bit patterns of bfloat16."""
    from triton import language

    return language.bfloat16 if device.type == "cuda" else language.float32


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    batch, seq, heads, _ = x.stride()
    return batch, seq, heads


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
