"""Block-sparse attention in Triton: any CUDA GPU from sm_80, any block sizes, text, grouped queries, row masks.

Tri Dao, "FlashAttention-2", arXiv:2307.08691, for the loop; the plan's blocks become pieces of one size, so that the
loop over keys has no inner loop and masks nothing but what is left of a block (see `pieces`).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.kernels.block_sparse.geometry import BlockGeometry
from diffusion_runtime.kernels.block_sparse.pieces import list_pieces, list_tiles
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan

if TYPE_CHECKING:
    from diffusion_runtime.kernels.block_sparse.api import PooledBranch

# Rows past the last head's that a bulk copy may read.
_TAIL = 128


@dataclass(frozen=True)
class TileShape:
    """rows: queries a program; piece: keys a step; the rest is how Triton compiles it."""

    rows: int
    piece: int
    num_warps: int
    num_stages: int
    bulk: bool


def is_interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(q: torch.Tensor, plan: SparsePlan) -> str | None:
    """Why this plan cannot be computed here on tensors like q; None when it can."""
    if not (q.is_cuda or is_interpreted()):
        return f"needs a CUDA GPU, the tensors are on {q.device}"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "needs sm_80 or newer"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, not {q.dtype}"
    if q.shape[-1] > 256:
        return f"takes head sizes up to 256, not {q.shape[-1]}"
    if plan.num_tokens >= 1 << 23:
        return f"takes fewer than {1 << 23} tokens, not {plan.num_tokens}"
    return None


def block_sparse_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    branch: PooledBranch | None = None,
    shape: TileShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; branch is added in the same pass.

    Returns out like q and lse [B, H, seq], natural log, float32. shape: None is the one that measured fastest.
    """
    prepared = prepare(q, k, v, plan, scale=scale, branch=branch, shape=shape)
    prepared.launch()
    return prepared.out, prepared.lse


@dataclass(frozen=True)
class Prepared:
    """Packed inputs and listed pieces; `launch` runs the kernel over them and may be called again."""

    out: torch.Tensor
    lse: torch.Tensor
    launch: Callable[[], object]


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    branch: PooledBranch | None = None,
    shape: TileShape | None = None,
) -> Prepared:
    """Everything that comes before the kernel; arguments as in block_sparse_triton."""
    from diffusion_runtime.kernels.block_sparse import triton_kernels as kernels

    batch, num_rows, num_heads, head_dim = q.shape
    if scale <= 0:
        # The running maximum is taken before the scale is applied, which must therefore keep the order.
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    shape = tile_shape(q, plan) if shape is None else shape
    width = max(16, 1 << (head_dim - 1).bit_length())
    text = plan.text_lengths
    packed = [
        _pack(kernels, x, geometry, plan.num_grid_tokens, text, width)
        for x, geometry in ((q, plan.q), (k, plan.kv), (v, plan.kv))
    ]
    rows = [
        _rows(x, count, width, shape) for x, count in zip(packed, (shape.rows, shape.piece, shape.piece), strict=True)
    ]
    pieces = list_pieces(kernels, plan, shape.piece)
    tiles = list_tiles(plan.q, shape.rows)
    num_text_tiles = -(-plan.num_text_tokens // shape.rows)
    # Padded text rows are written by no tile.
    out = q.new_zeros(q.shape) if text is not None else q.new_empty(q.shape)
    lse = q.new_full((batch, num_heads, num_rows), float("-inf"), dtype=torch.float32)
    pooled, gate = (out, out) if branch is None else (branch.pooled.contiguous(), _rows_contiguous(branch.gate))
    launch = functools.partial(
        kernels.attend[(tiles.count + num_text_tiles, batch * num_heads)],
        *rows,
        packed[1],
        packed[2],
        out,
        lse,
        plan.q.order,
        plan.q.offsets,
        tiles.blocks,
        tiles.starts,
        pieces.codes,
        pieces.blocks,
        pieces.num_full,
        pieces.num_partial,
        plan.group_of,
        plan.group_of if text is None else text,
        plan.group_of if plan.row_mask is None else plan.row_mask,
        pooled,
        gate,
        scale * math.log2(math.e),
        tiles.count,
        num_rows,
        plan.num_grid_tokens,
        num_heads,
        num_heads // plan.num_kv_heads,
        plan.q.num_blocks,
        pieces.codes.shape[2],
        1 if plan.row_mask is None else plan.row_mask.shape[3],
        0 if plan.q.num_groups == 1 else plan.q.num_tokens,
        0 if plan.q.num_groups == 1 else plan.q.num_blocks + 1,
        0 if plan.q.num_groups == 1 else tiles.count,
        out.stride(0),
        out.stride(1),
        out.stride(2),
        gate.stride(0),
        gate.stride(1),
        gate.stride(2),
        D=head_dim,
        W=width,
        ROWS=shape.rows,
        PIECE=shape.piece,
        TILES_PER_BLOCK=tiles.per_block,
        PIECES_PER_HEAD=pieces.per_head,
        HAS_TEXT=plan.num_text_tokens > 0,
        HAS_LENGTHS=text is not None,
        HAS_ROW_MASK=plan.row_mask is not None,
        HAS_BRANCH=branch is not None,
        BULK=shape.bulk,
        EXACT=q.dtype == torch.float32,
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return Prepared(out, lse, launch)


def tile_shape(q: torch.Tensor, plan: SparsePlan) -> TileShape:
    """What measured fastest on an H200 for blocks of this size; smaller where the head size or float32 asks for it."""
    bulk = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)
    head_dim, exact = q.shape[-1], q.dtype == torch.float32
    if exact or head_dim > 128:
        return TileShape(64, 32, 4, 2, bulk and not exact)
    rows = 64 if plan.q.max_block_size <= 64 else 128
    return TileShape(rows, 64, 4, 2, bulk)


def _pack(
    kernels: ModuleType,
    x: torch.Tensor,
    geometry: BlockGeometry,
    num_grid: int,
    text_lengths: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """x [B, N, heads, head_dim] as rows [B * heads * N + tail, width] in the geometry's order."""
    batch, num_rows, num_heads, head_dim = x.shape
    x = _rows_contiguous(x)
    packed = x.new_empty(batch * num_heads * num_rows + _TAIL, width)
    # What lies past the end is read by copies and weighed with 0: it must be a number.
    packed[-_TAIL:].zero_()
    block = 64
    kernels.pack_rows[(-(-num_rows // block), batch * num_heads)](
        x,
        geometry.order,
        geometry.order if text_lengths is None else text_lengths,
        packed,
        num_rows,
        num_grid,
        num_heads,
        0 if geometry.num_groups == 1 else geometry.num_tokens,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        num_heads * num_rows * width,
        num_rows * width,
        width,
        D=head_dim,
        W=width,
        BLOCK=block,
        HAS_LENGTHS=text_lengths is not None,
    )
    return packed


def reorder_tokens(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x [B, N, heads, D] with token order[p] at position p; order: int32 [N]; D is a power of two."""
    from diffusion_runtime.kernels.block_sparse import triton_kernels as kernels

    batch, num_rows, num_heads, head_dim = x.shape
    x, width, block = _rows_contiguous(x), 1 << (head_dim - 1).bit_length(), 64
    moved = x.new_empty(x.shape)
    kernels.pack_rows[(-(-num_rows // block), batch * num_heads)](
        x,
        order,
        order,
        moved,
        num_rows,
        num_rows,
        num_heads,
        0,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        moved.stride(0),
        moved.stride(2),
        moved.stride(1),
        D=head_dim,
        W=width,
        BLOCK=block,
        HAS_LENGTHS=False,
    )
    return moved


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x [B, N, heads, D] with the values of a head side by side, as the kernels read them."""
    return x if x.stride(3) == 1 else x.contiguous()


def _rows(packed: torch.Tensor, count: int, width: int, shape: TileShape) -> Any:
    """What the kernel loads rows from: a descriptor of `count` rows at a time, or the tensor."""
    if not shape.bulk:
        return packed
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(packed, [packed.shape[0], width], [width, 1], [count, width])
