"""Block-sparse attention on Hopper in Gluon, for blocks of at most 64 queries and 64 keys, head sizes up to 128.

A program has one tile of queries, a warpgroup that computes and a warp that fetches; two programs share a
multiprocessor, so that the softmax of one runs beside the products of the other. Blocks of 64 x 64 read 32 KB of keys
and values for 2.1 MFLOP: at the 9 TB/s that an H200's L2 cache gives, 576 TF/s is the most that they reach.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import torch

from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.kernels.block_packing import row_width
from diffusion_runtime.kernels.block_sparse import triton
from diffusion_runtime.kernels.block_sparse.flash4 import serves
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, SparsePlan, add_branch
from diffusion_runtime.kernels.block_sparse.triton import Prepared, TileShape, inputs_of
from diffusion_runtime.startup.importing import import_failure

# Queries of a program and keys of a step; keys of a chunk, and columns of its copy, as in the kernel.
TILE = 64
_CHUNK, _PANEL = 16, 64
DTYPES = (torch.bfloat16, torch.float16)
ROW_WIDTHS = (64, 128)
# Gluon is experimental: the releases of Triton whose Gluon has what the kernel calls.
TRITON_VERSIONS = ((3, 6), (3, 7))
# Three stages of 32 KB and the queries' 16 KB: two programs fill the 228 KB of a multiprocessor. Half of its registers
# each, which the compiler hands from the fetching warps to the computing ones.
_STAGES, _REGISTERS = 3, 128


@functools.cache
def package_refusal() -> str | None:
    """Return why the installed Triton's Gluon cannot be used, or None."""
    failure = import_failure("triton")
    if failure is not None:
        return f"needs Triton: {failure}"
    import triton as installed

    # Of the module: builds of torch install it as pytorch-triton or triton-rocm.
    version = str(installed.__version__)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) not in TRITON_VERSIONS:
        known = " and ".join(".".join(map(str, each)) for each in TRITON_VERSIONS)
        return f"is written for the Gluon of triton {known}, not of {version}"
    return None


def refusal(q: torch.Tensor, plan: SparsePlan) -> str | None:
    """Return why this plan cannot be computed here on tensors like q, or None."""
    if not q.is_cuda:
        return f"needs a CUDA GPU, the tensors are on {q.device}"
    if not serves(detect_hardware(str(q.device))):
        return "needs sm_90"
    return refusal_of_plan(q, plan) or package_refusal()


def refusal_of_plan(q: torch.Tensor, plan: SparsePlan) -> str | None:
    """Return why this plan cannot be computed on any machine, or None."""
    reason = refusal_of_form(q.dtype, q.shape[-1], max(plan.q.max_block_size, plan.kv.max_block_size))
    if reason is None and plan.row_mask is not None:
        return "supports no row masks"
    if reason is None and plan.pooled_tail:
        return "pools no keys: plans with a pooled tail run on triton, gathered and reference"
    return reason or triton.refusal_of_tokens(plan.num_tokens)


def refusal_of_form(dtype: torch.dtype, head_dim: int, largest_block: int | None) -> str | None:
    """Return why no plan of these blocks can be computed on any machine, or None."""
    if dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {dtype}"
    if row_width(head_dim) not in ROW_WIDTHS:
        return f"takes head sizes from {ROW_WIDTHS[0] // 2 + 1} to {ROW_WIDTHS[-1]}, not {head_dim}"
    if largest_block is None or largest_block > TILE:
        return f"needs blocks of at most {TILE} tokens"
    return None


def block_sparse_gluon(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    branch: PooledBranch | None = None,
    packed: PackedTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as block_sparse_triton does, with the same arguments. Returns out like q and lse [B, H, seq], float32."""
    # The gates take the place of the queries in shared memory, so they are of one dtype.
    inside = branch is not None and branch.gate.dtype == q.dtype
    prepared = prepare(q, k, v, plan, scale=scale, branch=branch if inside else None, packed=packed)
    prepared.launch()
    out = prepared.out if branch is None or inside else add_branch(prepared.out, plan, branch)
    return out, prepared.lse


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float,
    branch: PooledBranch | None = None,
    packed: PackedTokens | None = None,
) -> Prepared:
    """Prepare everything that the kernel needs; arguments as in block_sparse_gluon."""
    from diffusion_runtime.kernels.block_sparse import gluon_kernels as kernels

    batch, num_rows, num_heads, head_dim = q.shape
    shape = TileShape(TILE, TILE, 4, _STAGES, bulk=True)
    given = inputs_of(q, k, v, plan, shape, scale=scale, branch=branch, packed=packed)
    pieces, tiles, out, text = given.pieces, given.tiles, given.out, plan.text_lengths
    width, none = row_width(head_dim), plan.group_of
    num_text_tiles = -(-plan.num_text_tokens // TILE)
    is_shared = plan.q.num_groups == 1

    def launch() -> None:
        kernels.attend_tiles[(batch * num_heads * (num_text_tiles + tiles.count),)](
            *(_rows(x, [TILE, width]) for x in given.values),
            *(_rows(x, [_CHUNK, _PANEL]) for x in given.values[1:]),
            out,
            given.lse,
            plan.q.order,
            plan.q.offsets,
            tiles.blocks,
            tiles.starts,
            pieces.codes,
            pieces.num_full,
            pieces.num_partial,
            plan.group_of,
            none if text is None else text,
            given.pooled,
            given.gate,
            given.scale * math.log2(math.e),
            tiles.count,
            num_text_tiles,
            num_rows,
            plan.num_grid_tokens,
            batch * num_heads,
            num_heads,
            num_heads // plan.num_kv_heads,
            plan.q.num_blocks,
            pieces.codes.shape[2],
            *((0, 0, 0) if is_shared else (plan.q.num_tokens, plan.q.num_blocks + 1, tiles.count)),
            *out.stride()[:3],
            *given.gate.stride()[:3],
            *given.strides(-2),
            D=head_dim,
            W=width,
            IN_PLACE=given.in_place,
            TILES_PER_BLOCK=tiles.per_block,
            PIECES_PER_HEAD=pieces.per_head,
            HAS_TEXT=plan.num_text_tokens > 0,
            HAS_LENGTHS=text is not None,
            HAS_BRANCH=branch is not None,
            HAS_RESTS=plan.kv.uniform_block_size != TILE,
            STAGES=_STAGES,
            num_warps=4,
            maxnreg=_REGISTERS,
        )

    return Prepared(out, given.lse, launch)


def _rows(x: torch.Tensor, block: list[int]) -> Any:
    """Return a descriptor from which blocks of rows are copied: packed rows, or tokens that are read in place."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if x.dim() == 2:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
    batch, num_tokens, num_heads, head_dim = x.shape
    rows = [batch * num_tokens, (num_heads - 1) * x.stride(2) + head_dim]
    return TensorDescriptor(x, rows, [x.stride(1), 1], block, layout)
