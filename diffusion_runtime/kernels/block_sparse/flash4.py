"""Block-sparse attention by FlashAttention-4's CuTe kernel, where every block is a multiple of 128 tokens.

Needs the package flash-attn-4 (Dao et al., arXiv:2407.08608 and its successors) and an sm_90 GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.kernels.block_packing import reorder_tokens
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.startup.importing import import_failure
from diffusion_runtime.startup.remembered_imports import ImportCheck, forget, is_remembered, remember

TILE = 128
DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128)
# The module of the block-sparse form, and what it must have.
_BLOCK_SPARSE = "flash_attn.cute.block_sparsity", ("BlockSparseTensorsTorch",)


_logger = logging.getLogger("diffusion_runtime.attention")


@functools.cache
def package_refusal() -> str | None:
    """Return why flash-attn-4 cannot be used in this process, or None.

    The first call imports the package if it is installed, which takes seconds. A failing import is logged, because
    Triton then computes in its place.
    """
    try:
        installed = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        installed = False
    if not installed:
        return "flash-attn-4 is not installed: pip install 'diffusion-runtime[flash]'"
    failure = import_failure("flash_attn.cute", "flash_attn_func")
    module, functions = _BLOCK_SPARSE
    failure = failure or import_failure(module, *functions)
    if failure is None:
        return None
    forget(module)
    refusal = f"flash-attn-4 is installed and cannot be imported: {failure}"
    _logger.warning("block-sparse attention runs on Triton: %s", refusal)
    return refusal


def check_package(hardware: Hardware) -> None:
    """Ask `package_refusal` before the first call, unless its import is remembered to pass on this machine."""
    check = ImportCheck("flash-attn-4", *_BLOCK_SPARSE, hardware.describe())
    if not is_remembered(check) and package_refusal() is None:
        remember(check)


def serves(hardware: Hardware) -> bool:
    """Return True if the kernel is built for the chip (sm_90). No ROCm chip is supported, though numbered alike."""
    return hardware.platform == "cuda" and hardware.capability == (9, 0)


def refusal(q: torch.Tensor, plan: SparsePlan) -> str | None:
    """Return why this plan cannot be computed here on tensors like q, or None."""
    reason = refusal_of_blocks(q, plan.q, plan.kv, plan.num_grid_tokens)
    if reason is None and plan.row_mask is not None:
        reason = "supports no row masks"
    return reason


def refusal_of_blocks(q: torch.Tensor, q_blocks: BlockGeometry, kv_blocks: BlockGeometry, num_grid: int) -> str | None:
    """Return why no plan of these blocks without row masks can be computed on tensors like q, or None."""
    if not q.is_cuda:
        return f"needs a CUDA GPU, the tensors are on {q.device}"
    if not serves(detect_hardware(str(q.device))):
        return "needs sm_90"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'diffusion-runtime[sparse]'"
    if q.dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {q.dtype}"
    if q.shape[-1] not in HEAD_SIZES:
        return f"takes head sizes 64 and 128 here, not {q.shape[-1]}"
    if q_blocks.num_tokens > num_grid:
        return "supports no text beside the grid"
    if q_blocks.num_groups > 1 or kv_blocks.num_groups > 1:
        return "needs blocks that all heads share"
    sizes = (q_blocks.uniform_block_size, kv_blocks.uniform_block_size)
    if any(size is None or size % TILE for size in sizes):
        return f"needs blocks of equal size, a multiple of {TILE} tokens"
    return package_refusal()


def block_sparse_flash4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]. Returns out like q and lse [B, H, seq], float32."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    q_size = plan.q.uniform_block_size
    assert q_size is not None, "refusal asks for it"
    counts, index = tile_selection(plan)
    blocks = BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(counts),
        mask_block_idx=torch.zeros_like(index[..., :1]),
        full_block_cnt=counts,
        full_block_idx=index,
        block_size=(q_size, TILE),
    )
    out, lse = flash_attn_func(
        _in_order(q, plan.q),
        _in_order(k, plan.kv),
        _in_order(v, plan.kv),
        softmax_scale=scale,
        block_sparse_tensors=blocks,
        return_lse=True,
        pack_gqa=False,
    )
    if plan.q.is_identity:
        return out, lse
    positions = plan.q.positions()[0]
    return reorder_tokens(out, positions), lse[:, :, positions.long()]


def _in_order(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """x [B, N, heads, D] block by block, x itself where its tokens are in that order."""
    return x if geometry.is_identity else reorder_tokens(x, geometry.order[0])


def tile_selection(plan: SparsePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plan in tiles of 128 keys: counts int32 [B, H, q blocks], index int32 [B, H, q blocks, tiles]."""
    factor = (plan.kv.uniform_block_size or 0) // TILE
    within = torch.arange(factor, dtype=torch.int32, device=plan.device)
    tiles = (plan.kv_index[..., None] * factor + within).flatten(-2)
    # What follows the count is unspecified in a plan; here it must at least be an existing tile.
    tiles = tiles.clamp(0, plan.kv.num_blocks * factor - 1)
    counts = plan.kv_count * factor
    group = plan.group_of.long()
    return counts[group].contiguous(), tiles[group].contiguous()
