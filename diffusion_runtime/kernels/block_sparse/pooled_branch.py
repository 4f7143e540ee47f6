"""The coarse branch of attention over pooled blocks: one row per block of queries, broadcast to its tokens and weighted
by a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.kernels.block_sparse.plan import SparsePlan


@dataclass(frozen=True)
class PooledBranch:
    """What is added to the result: gate * pooled[block of the query], on grid queries.

    pooled: [B, H, q blocks, head_dim]; gate: [B, seq, H, head_dim].
    """

    pooled: torch.Tensor
    gate: torch.Tensor


def add_branch(out: torch.Tensor, plan: SparsePlan, branch: PooledBranch) -> torch.Tensor:
    """out + gate * pooled, in float32 at least; returned in the shape and dtype of out [B, seq, H, head_dim]."""
    working = torch.promote_types(out.dtype, torch.float32)
    # Text tokens read one row too many, which is zero: they have no block to pool.
    pooled = torch.nn.functional.pad(branch.pooled.to(working), (0, 0, 0, 1))
    block = plan.q.block_of_token().long()
    rows = block.view(-1, 1, block.shape[1]) if plan.q.num_groups == 1 else block.view(*pooled.shape[:2], -1)
    index = rows.expand(*pooled.shape[:2], -1)[..., None].expand(-1, -1, -1, pooled.shape[-1])
    spread = pooled.gather(2, index).transpose(1, 2)
    return (out.to(working) + branch.gate.to(working) * spread).to(out.dtype)
