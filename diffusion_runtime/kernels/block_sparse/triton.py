"""Block-sparse FlashAttention in Triton: any CUDA GPU from sm_80, any block sizes, text, grouped queries, row masks.

Tri Dao, "FlashAttention-2", arXiv:2307.08691, for the loop; the plan's blocks become pieces of one size, so that the
loop over keys has no inner loop and masks nothing but the rest of a block (see `pieces`).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.kernels.block_packing import Averaged, pack_tokens, row_width, rows_contiguous
from diffusion_runtime.kernels.block_sparse.pieces import Pieces, Tiles, list_pieces, list_tiles
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, SparsePlan
from diffusion_runtime.kernels.block_sparse.pooled_tail import BlockMeans, listed_words, means_of, tail_rows

MINIMUM_CAPABILITY = (8, 0)
# The dtypes the kernels compute; the reference computes any other.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAXIMUM_HEAD_SIZE = 256
# Fewer than these.
MAXIMUM_TOKENS = 1 << 23


@dataclass(frozen=True)
class TileShape:
    """rows: queries per program; piece: keys per step; the rest are Triton's compile options. rest_rows: when the rest
    of a block after whole tiles is no more than this, a program of this many rows computes it, in a launch of its own;
    0: never."""

    rows: int
    piece: int
    num_warps: int
    num_stages: int
    bulk: bool
    rest_rows: int = 0


def is_interpreted() -> bool:
    """Return True if Triton runs kernels on CPU tensors in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def serves(hardware: Hardware) -> bool:
    """Return True if the kernels run on a chip that torch calls `cuda`: NVIDIA from MINIMUM_CAPABILITY on, and ROCm."""
    return hardware.capability is None or hardware.capability >= MINIMUM_CAPABILITY


def has_bulk_copies(hardware: Hardware) -> bool:
    """Return True if rows are fetched by TMA. ROCm numbers chips alike (gfx942 is 9.4), has no TMA and reports no
    capability here."""
    return hardware.platform == "cuda" and hardware.capability is not None and hardware.capability >= (9, 0)


def refusal(q: torch.Tensor, plan: SparsePlan) -> str | None:
    """Return why this plan cannot be computed here on tensors like q, or None."""
    return refusal_of_size(q, plan.num_tokens)


def refusal_of_size(q: torch.Tensor, num_tokens: int) -> str | None:
    """Return why no plan of this many tokens can be computed on tensors like q, or None."""
    reason = refusal_of_device(q)
    if reason is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"takes bfloat16, float16 and float32, not {q.dtype}"
    if q.shape[-1] > MAXIMUM_HEAD_SIZE:
        return f"takes head sizes up to {MAXIMUM_HEAD_SIZE}, not {q.shape[-1]}"
    return refusal_of_tokens(num_tokens)


def refusal_of_tokens(num_tokens: int) -> str | None:
    """Return why the kernels compute no plan of this many tokens, or None."""
    if num_tokens >= MAXIMUM_TOKENS:
        return f"takes fewer than {MAXIMUM_TOKENS} tokens, not {num_tokens}"
    return None


def refusal_of_device(x: torch.Tensor) -> str | None:
    """Return why no kernel here runs on the device of a tensor, or None."""
    if not (x.is_cuda or is_interpreted()):
        return f"needs a CUDA GPU, the tensors are on {x.device}"
    if x.is_cuda and not serves(detect_hardware(str(x.device))):
        return "needs sm_80 or newer"
    return None


# Tokens of a block, see reads_in_place.
_LARGEST_READ_IN_PLACE = 256


def reads_in_place(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_geometry: BlockGeometry, kv_geometry: BlockGeometry
) -> bool:
    """Return True if a plan of these blocks without row masks is computed on q, k and v as they are: their tokens are
    in block order, as a model keeps them (attention/token_order.py), and their rows can be copied in bulk.

    False for large blocks. Rows of a packed product lie apart, which slows the kernel; STA's tiles of 384 tokens read
    each row more often: 9.4 ms of a step of Wan 1.3B on an H200, where the copies take 4.8
    (benchmarks/results/static_order_gpu.json).
    """
    stand_in_order = q_geometry.is_identity and kv_geometry.is_identity
    if max(q_geometry.max_block_size, kv_geometry.max_block_size) > _LARGEST_READ_IN_PLACE:
        return False
    return stand_in_order and row_width(q.shape[3]) == q.shape[3] and all(map(_has_regular_rows, (q, k, v)))


def _has_regular_rows(x: torch.Tensor) -> bool:
    """Return True if the tokens of all samples [B, N, heads, head_dim] are evenly spaced rows, aligned for TMA."""
    batch, num_tokens, num_heads, _ = x.shape
    steps = (x.stride(1), x.stride(2) if num_heads > 1 else 0)
    regular = x.stride(3) == 1 and (batch == 1 or x.stride(0) == num_tokens * x.stride(1))
    return regular and x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)


def block_sparse_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    branch: PooledBranch | None = None,
    packed: PackedTokens | None = None,
    means: BlockMeans | None = None,
    shape: TileShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; branch is added in the same pass.
    packed: q, k and v in the plan's geometries, when they have been packed before. means: of its key blocks, when they
    have been computed; a pooled tail needs them.

    Returns out like q and lse [B, H, seq], natural log, float32. shape: None is the one that measured fastest.
    """
    prepared = prepare(q, k, v, plan, scale=scale, branch=branch, packed=packed, means=means, shape=shape)
    prepared.launch()
    return prepared.out, prepared.lse


@dataclass(frozen=True)
class Prepared:
    """Packed inputs and listed pieces; `launch` runs the kernels over them and may be called again."""

    out: torch.Tensor
    lse: torch.Tensor
    launch: Callable[[], object]


@dataclass(frozen=True)
class KernelInputs:
    """Tensors that the kernels of a plan read and write.

    values: q, k and v, packed or in place; scale: positive; packed: what values are of, None in place; pooled, gate:
    out where there is no branch.
    """

    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    scale: float
    packed: PackedTokens | None
    pieces: Pieces
    tiles: Tiles
    out: torch.Tensor
    lse: torch.Tensor
    pooled: torch.Tensor
    gate: torch.Tensor

    @property
    def in_place(self) -> bool:
        return self.packed is None

    def strides(self, dim: int) -> tuple[int, int, int]:
        """Return how far q, k and v lie apart from token to token (dim -3) or from head to head (-2): 0 for packed
        rows, whose strides the kernels know."""
        q, k, v = (x.stride(dim) if self.in_place else 0 for x in self.values)
        return q, k, v


def inputs_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    shape: TileShape,
    *,
    scale: float,
    branch: PooledBranch | None,
    packed: PackedTokens | None,
    has_means: bool = True,
) -> KernelInputs:
    """Pack q, k and v where they are not read in place, and list pieces and tiles; arguments as in block_sparse_triton.
    has_means: False computes the means of keys and values while they are packed."""
    from diffusion_runtime.kernels.block_sparse import triton_kernels as kernels

    batch, num_rows, num_heads, _ = q.shape
    text = plan.text_lengths
    if scale <= 0:
        # The running maximum is taken before the scale is applied, so the scale must keep the order.
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
        packed = None
    in_place = packed is None and plan.row_mask is None and reads_in_place(q, k, v, plan.q, plan.kv)
    if packed is None and not in_place:
        averaged: Averaged = "none" if has_means else "kv"
        packed = pack_tokens(
            q, k, v, plan.q, plan.kv, num_grid_tokens=plan.num_grid_tokens, text_lengths=text, averaged=averaged
        )
    # Padded text rows are written by no tile.
    out = q.new_empty(q.shape) if text is None else q.new_zeros(q.shape)
    lse = torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=q.device)
    if text is not None:
        lse.fill_(float("-inf"))
    pooled, gate = (out, out) if branch is None else (branch.pooled.contiguous(), rows_contiguous(branch.gate))
    return KernelInputs(
        values=(q, k, v) if packed is None else (packed.q, packed.k, packed.v),
        scale=scale,
        packed=packed,
        pieces=list_pieces(kernels, plan, shape.piece),
        tiles=list_tiles(plan.q, shape.rows, shape.rest_rows),
        out=out,
        lse=lse,
        pooled=pooled,
        gate=gate,
    )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    branch: PooledBranch | None = None,
    packed: PackedTokens | None = None,
    means: BlockMeans | None = None,
    shape: TileShape | None = None,
) -> Prepared:
    """Prepare everything that the kernels need; arguments as in block_sparse_triton.

    Long, because a launch names all of the kernel's arguments.
    """
    from diffusion_runtime.kernels.block_sparse import triton_kernels as kernels

    batch, num_rows, num_heads, head_dim = q.shape
    shape = tile_shape(q, plan) if shape is None else shape
    text = plan.text_lengths
    has_means = means is not None or not plan.pooled_tail
    given = inputs_of(q, k, v, plan, shape, scale=scale, branch=branch, packed=packed, has_means=has_means)
    values, pieces, tiles, out, lse = given.values, given.pieces, given.tiles, given.out, given.lse
    k_rows, v_rows = (rows_of(x, shape.piece, shape) for x in values[1:])
    broken = plan.group_of if plan.row_mask is None else _has_broken_values(values[2])
    tail = tail_rows(k, v, plan.kv, means or means_of(given.packed)) if plan.pooled_tail else (out, out, out)
    listed = listed_words(plan) if plan.pooled_tail else plan.group_of

    def attend(
        rows: int, num_tiles: int, num_text_tiles: int, per_block: int, left: int, rest_of: int, look: bool
    ) -> None:
        kernels.attend[(num_tiles + num_text_tiles, batch * num_heads)](
            rows_of(values[0], rows, shape),
            k_rows,
            v_rows,
            *values,
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
            broken,
            given.pooled,
            given.gate,
            *tail,
            listed,
            given.scale * math.log2(math.e),
            num_tiles,
            num_rows,
            plan.num_grid_tokens,
            num_heads,
            num_heads // plan.num_kv_heads,
            plan.q.num_blocks,
            plan.kv.num_blocks,
            pieces.codes.shape[2],
            1 if plan.row_mask is None else plan.row_mask.shape[3],
            *((0, 0, 0) if plan.q.num_groups == 1 else (plan.q.num_tokens, plan.q.num_blocks + 1, tiles.count)),
            *out.stride()[:3],
            *given.gate.stride()[:3],
            *itertools.chain(*zip(given.strides(-3), given.strides(-2), strict=True)),
            D=head_dim,
            W=row_width(head_dim),
            IN_PLACE=given.in_place,
            ROWS=rows,
            PIECE=shape.piece,
            TILES_PER_BLOCK=per_block,
            LEFT=left,
            REST_OF=rest_of,
            PIECES_PER_HEAD=pieces.per_head,
            HAS_TEXT=plan.num_text_tokens > 0,
            HAS_LENGTHS=text is not None,
            HAS_ROW_MASK=plan.row_mask is not None,
            LOOK_FOR_BROKEN=look,
            HAS_BRANCH=branch is not None,
            HAS_TAIL=plan.pooled_tail,
            BULK=shape.bulk,
            EXACT=q.dtype == torch.float32,
            STAGES=shape.num_stages,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    def launch() -> None:
        num_text_tiles = -(-plan.num_text_tokens // shape.rows)
        for look in (False,) if plan.row_mask is None else (False, True):
            attend(shape.rows, tiles.count, num_text_tiles, tiles.per_block, tiles.rest_rows, 0, look)
            if tiles.rest_rows:
                attend(tiles.rest_rows, plan.q.num_blocks, 0, 1, 0, shape.rows, look)

    return Prepared(out, lse, launch)


def tile_shape(q: torch.Tensor, plan: SparsePlan) -> TileShape:
    """Return the tile shape that measured fastest on an H200 for blocks of this size; smaller if the head size or
    float32 requires it."""
    bulk = q.is_cuda and has_bulk_copies(detect_hardware(str(q.device)))
    head_dim, exact = q.shape[-1], q.dtype.itemsize > 2
    if exact or head_dim > 128:
        return TileShape(64, 32, 4, 2, bulk and not exact)
    # A tile of 64 rows takes 0.6 of the time of one of 128.
    if plan.q.max_block_size <= 64:
        return TileShape(64, 64, 4, 2, bulk)
    return TileShape(128, 64, 4, 2, bulk, rest_rows=64)


def _has_broken_values(v: torch.Tensor) -> torch.Tensor:
    """int32 [1], on the device: 1 when a value is NaN or inf. The extremes of a tensor with a NaN are NaN."""
    low, high = v.aminmax()
    return (~(low.isfinite() & high.isfinite())).to(torch.int32)[None]


def rows_of(x: torch.Tensor, count: int, shape: TileShape) -> Any:
    """Return the source from which the kernel loads rows: a descriptor of `count` rows at a time, or the tensor.

    x: packed rows, or tokens [B, N, heads, head_dim] that are read in place.
    """
    if not shape.bulk:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    if x.dim() == 2:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [count, x.shape[1]])
    batch, num_tokens, num_heads, head_dim = x.shape
    rows = [batch * num_tokens, (num_heads - 1) * x.stride(2) + head_dim]
    return TensorDescriptor(x, rows, [x.stride(1), 1], [count, head_dim])
