"""Block-sparse attention: checks, the choice of who computes it, and one result for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse import flash4, triton
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference

IMPLEMENTATIONS = ("reference", "triton", "flash4")


@dataclass(frozen=True)
class PooledBranch:
    """What is added to the result: gate * pooled[block of the query], on grid queries.

    pooled: [B, H, q blocks, head_dim]; gate: [B, seq, H, head_dim].
    """

    pooled: torch.Tensor
    gate: torch.Tensor


class BlockSparseResult(NamedTuple):
    """out: [B, seq, H, head_dim] in q's dtype; lse: natural log, float32, [B, H, seq], or None; who computed it."""

    out: torch.Tensor
    lse: torch.Tensor | None
    implementation: str


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    branch: PooledBranch | None = None,
    implementation: str = "auto",
) -> BlockSparseResult:
    """softmax(scale q k^T) v over the pairs that `plan` keeps, plus `branch`.

    q: [B, seq, H, head_dim]; k, v: [B, seq, kv_heads, head_dim]; scale: None is 1 / sqrt(head_dim). A query that sees
    nothing gives 0 and a log-sum-exp of -inf; the log-sum-exp knows nothing of `branch`.
    implementation: one of IMPLEMENTATIONS; `auto` is the fastest that can compute this plan on this device.

    Raises ConfigError when the tensors do not fit the plan, or the implementation that was asked for cannot run.
    """
    _check(q, k, v, plan)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = _choose(implementation, q, plan)
    if chosen == "reference":
        out, lse = block_sparse_reference(q, k, v, plan, scale=scale)
        lse = lse.float()
    elif chosen == "triton":
        out, lse = triton.block_sparse_triton(q, k, v, plan, scale=scale, branch=branch)
        branch = None
    else:
        out, lse = flash4.block_sparse_flash4(q, k, v, plan, scale=scale)
    if branch is not None:
        out = add_branch(out, plan, branch)
    return BlockSparseResult(out, lse if return_lse else None, chosen)


def add_branch(out: torch.Tensor, plan: SparsePlan, branch: PooledBranch) -> torch.Tensor:
    """out + gate * pooled, in float32 at least; out [B, seq, H, head_dim] as it came."""
    working = torch.promote_types(out.dtype, torch.float32)
    # Text tokens read one row too many, which is zero: they have no block to pool.
    pooled = torch.nn.functional.pad(branch.pooled.to(working), (0, 0, 0, 1))
    block = plan.q.block_of_token().long()
    rows = block.view(-1, 1, block.shape[1]) if plan.q.num_groups == 1 else block.view(*pooled.shape[:2], -1)
    index = rows.expand(*pooled.shape[:2], -1)[..., None].expand(-1, -1, -1, pooled.shape[-1])
    spread = pooled.gather(2, index).transpose(1, 2)
    return (out.to(working) + branch.gate.to(working) * spread).to(out.dtype)


def refusal(implementation: str, q: torch.Tensor, plan: SparsePlan) -> str | None:
    """Why an implementation cannot compute this plan on these tensors; None when it can."""
    if implementation == "reference":
        return None
    return triton.refusal(q, plan) if implementation == "triton" else flash4.refusal(q, plan)


def _choose(implementation: str, q: torch.Tensor, plan: SparsePlan) -> str:
    if implementation == "auto":
        return next(name for name in ("flash4", "triton", "reference") if refusal(name, q, plan) is None)
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation: expected auto, {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    reason = refusal(implementation, q, plan)
    if reason is not None:
        raise ConfigError(f"block-sparse implementation {implementation!r} cannot run here: {reason}; use auto")
    return implementation


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan) -> None:
    expected_q = (plan.batch, plan.num_tokens, plan.num_heads)
    expected_kv = (plan.batch, plan.num_tokens, plan.num_kv_heads)
    if q.shape[:3] != expected_q or k.shape[:3] != expected_kv or v.shape != k.shape or k.shape[3] != q.shape[3]:
        raise ConfigError(
            f"block-sparse attention: the plan of {plan.method} is for q {expected_q} and k, v {expected_kv} (batch, "
            f"seq, heads), got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.device != plan.device:
        raise ConfigError(f"block-sparse attention: q is on {q.device}, the plan on {plan.device}; use plan.to()")
