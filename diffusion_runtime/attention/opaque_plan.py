"""plan_attention as an operator of a graph: a SparsePlan as tensors and sizes, which torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffusion_runtime.attention.recorded_values import CallValues, call_values
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan


@torch.library.custom_op("diffusion_runtime::plan_attention", mutates_args=())
def opaque_plan(
    q: torch.Tensor, k: torch.Tensor, text: str, numbers: Sequence[int], times: torch.Tensor, masks_rows: bool
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    int,
    int,
    int,
]:
    """The plan of a call: order and offsets of queries and of keys, group_of, kv_count, kv_index, text_lengths,
    row_mask (empty unless masks_rows), both max_block_size, and 2 for a dense plan, else 1."""
    plan = _planner(q, k, call_values(text, numbers, times))
    num_text = plan.num_text_tokens
    lengths = plan.text_lengths
    if lengths is None:
        lengths = torch.full((plan.batch,), num_text, dtype=torch.int32, device=plan.device)
    mask = plan.row_mask
    if mask is None:
        # Every listed block, or nothing of a method whose plans have none.
        words = (plan.kv_index.shape[2] + 31) // 32 if masks_rows else 0
        shape = (plan.batch, plan.num_heads, plan.num_grid_tokens, words)
        mask = torch.full(shape, -1, dtype=torch.int32, device=plan.device)
    tensors = (
        *(plan.q.order, plan.q.offsets, plan.kv.order, plan.kv.offsets),
        *(plan.group_of, plan.kv_count, plan.kv_index, lengths, mask),
    )
    # Copies: the request's cache holds some of them, and an operator returns none of its own.
    order, offsets, kv_order, kv_offsets, group, count, index, lengths, mask = (x.clone() for x in tensors)
    sizes = plan.q.max_block_size, plan.kv.max_block_size, 2 if plan.is_dense else 1
    return order, offsets, kv_order, kv_offsets, group, count, index, lengths, mask, *sizes


@opaque_plan.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    text: str,  # noqa: ARG001
    numbers: Sequence[int],  # noqa: ARG001
    times: torch.Tensor,  # noqa: ARG001
    masks_rows: bool,
) -> Any:
    size = torch.library.get_ctx().new_dynamic_size

    def empty(*shape: Any) -> torch.Tensor:
        return q.new_empty(shape, dtype=torch.int32)

    batch, num_tokens, num_heads = q.shape[:3]
    rows, num_q_blocks = size(), size()
    row_words = (batch, num_heads, size(), size() if masks_rows else 0)
    return (
        *(empty(size(), num_tokens), empty(size(), size())),
        *(empty(size(), num_tokens), empty(size(), size())),
        *(empty(batch, num_heads), empty(rows, num_q_blocks), empty(rows, num_q_blocks, size())),
        *(empty(batch), empty(*row_words)),
        *(size(), size(), size(min=1)),
    )


def recorded_plan(
    made: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    layout: TokenLayout,
    method: str,
    masks_rows: bool,
    pooled_tail: bool,
) -> SparsePlan:
    """While torch.compile traces: the plan out of what the operator made."""
    order, offsets, kv_order, kv_offsets, group, count, index, lengths, mask, largest, kv_largest, kind = made
    return SparsePlan(
        method=method,
        batch=q.shape[0],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        q=BlockGeometry(order, offsets, largest),
        kv=BlockGeometry(kv_order, kv_offsets, kv_largest),
        group_of=group,
        kv_count=count,
        kv_index=index,
        num_grid_tokens=layout.num_grid_tokens,
        text_lengths=lengths,
        row_mask=mask if masks_rows else None,
        pooled_tail=pooled_tail,
        is_dense=kind >= 2,
    )


# What computes a plan; functional.py above sets it.
PLANNERS: list[Callable[[torch.Tensor, torch.Tensor, CallValues], SparsePlan]] = []


def _planner(q: torch.Tensor, k: torch.Tensor, values: CallValues) -> SparsePlan:
    return PLANNERS[0](q, k, values)
