"""Which implementation `auto` will take for a plan that is not made yet."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.kernels.block_sparse import flash4, gluon, triton
from diffusion_runtime.kernels.block_sparse.row_masks import MAXIMUM_BLOCKS

_GPU_PLATFORMS = ("cuda", "rocm")


class PlanForm(NamedTuple):
    """num_tokens: text included; num_key_blocks: at most. block_size: of every block, None where blocks differ;
    largest_block: None where the content decides; has_row_masks: with a bound on a query's blocks; is_shared: whether
    all heads have the same blocks; pooled_tail: as of the plan."""

    num_tokens: int
    num_grid_tokens: int
    num_key_blocks: int
    block_size: int | None = None
    largest_block: int | None = None
    has_row_masks: bool = False
    is_shared: bool = True
    pooled_tail: bool = False


def expected_implementation(hardware: Hardware, dtype: torch.dtype, head_dim: int, plan: PlanForm) -> str:
    """Return the BlockSparseResult.implementation that `auto` leads to; the rules are those of `refusal` in api.py."""
    if _triton_refuses(hardware, dtype, head_dim, plan):
        return "reference"
    has_text = plan.num_tokens > plan.num_grid_tokens
    if plan.has_row_masks:
        is_gathered = not has_text and plan.is_shared and plan.num_key_blocks <= MAXIMUM_BLOCKS
        return "gathered" if is_gathered else "triton"
    if plan.pooled_tail:
        return "triton"
    if flash4.serves(hardware) and gluon.refusal_of_form(dtype, head_dim, plan.largest_block) is None:
        return "gluon" if gluon.package_refusal() is None else "triton"
    if has_text or not plan.is_shared or plan.block_size is None or plan.block_size % flash4.TILE:
        return "triton"
    if not flash4.serves(hardware) or dtype not in flash4.DTYPES or head_dim not in flash4.HEAD_SIZES:
        return "triton"
    return "flash4" if flash4.package_refusal() is None else "triton"


def _triton_refuses(hardware: Hardware, dtype: torch.dtype, head_dim: int, plan: PlanForm) -> bool:
    if hardware.platform in _GPU_PLATFORMS:
        if not triton.serves(hardware):
            return True
    elif not triton.is_interpreted():
        return True
    return dtype not in triton.DTYPES or head_dim > triton.MAXIMUM_HEAD_SIZE or plan.num_tokens >= triton.MAXIMUM_TOKENS
