"""The specification of block-sparse attention: eager, float32 (float64 for float64 inputs), on any device.

Each block of queries gathers the keys that it lists, so the work is proportional to the pattern, and keys that no block
lists cannot reach the result, whatever they hold.
"""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.pooled_tail import PooledKeys, pooled_keys


def block_sparse_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [batch, seq, heads, head_dim]; k, v: [batch, seq, kv_heads, head_dim].

    Returns out like q and lse [batch, heads, seq], natural log, in the working precision. Rows that see nothing give 0
    and -inf.
    """
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=working, device=q.device)
    lse = torch.full(out.shape[:3], float("-inf"), dtype=working, device=q.device)
    repeats = plan.num_heads // plan.num_kv_heads
    for sample in range(plan.batch):
        for heads in _heads_that_share(plan, sample):
            kv_heads = torch.tensor([head // repeats for head in heads.tolist()], device=q.device)
            _attend_heads(
                q[sample][:, heads].transpose(0, 1).to(working),
                k[sample][:, kv_heads].transpose(0, 1).to(working),
                v[sample][:, kv_heads].transpose(0, 1).to(working),
                plan,
                sample,
                heads,
                scale,
                out[sample],
                lse[sample],
            )
    return out.transpose(1, 2).to(q.dtype), lse


def _heads_that_share(plan: SparsePlan, sample: int) -> list[torch.Tensor]:
    """Query heads of a sample in sets that share geometry and selection: each set is computed together."""
    if plan.row_mask is not None or plan.q.num_groups > 1 or plan.kv.num_groups > 1:
        return [torch.tensor([head], device=plan.device) for head in range(plan.num_heads)]
    groups = plan.group_of[sample]
    return [(groups == group).nonzero()[:, 0] for group in torch.unique(groups)]


def _attend_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    sample: int,
    heads: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """q, k, v: [n, seq, head_dim] of the heads in `heads`; writes their rows of out [H, seq, D] and lse [H, seq]."""
    head = int(heads[0])
    q_row = 0 if plan.q.num_groups == 1 else sample * plan.num_heads + head
    kv_row = sample * plan.num_kv_heads + head // (plan.num_heads // plan.num_kv_heads)
    kv_row = 0 if plan.kv.num_groups == 1 else kv_row
    q_order, kv_order = plan.q.order[q_row].long(), plan.kv.order[kv_row].long()
    q_offsets = plan.q.offsets[q_row].tolist()
    grid, valid = plan.num_grid_tokens, plan.num_grid_tokens + plan.valid_text(sample)
    listed = plan.block_mask[int(plan.group_of[sample, head])]
    kv_sizes = plan.kv.sizes[kv_row].long()
    rows_see = plan.row_selection(sample, head) if plan.row_mask is not None else None
    pooled = pooled_keys(k, v, kv_order[:grid], plan.kv.offsets[kv_row]) if plan.pooled_tail else None
    for block in range(plan.q.num_blocks):
        start, stop = q_offsets[block], q_offsets[block + 1]
        if start == stop:
            continue
        positions = listed[block].repeat_interleave(kv_sizes).nonzero()[:, 0]
        seen = listed[block : block + 1] if rows_see is None else rows_see[start:stop]
        tail = None if pooled is None else pooled.left_out(seen)
        keys = torch.cat([kv_order[positions], kv_order[grid:valid]])
        visible = None
        if rows_see is not None:
            block_of_position = torch.repeat_interleave(kv_sizes)
            visible = seen[:, block_of_position[positions]]
            visible = torch.nn.functional.pad(visible, (0, valid - grid), value=True)
        _attend_rows(q, k, v, q_order[start:stop], keys, visible, scale, heads, out, lse, tail)
    if valid > grid:
        _attend_rows(q, k, v, q_order[grid:valid], kv_order[:valid], None, scale, heads, out, lse)


def _attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    heads: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tail: PooledKeys | None = None,
) -> None:
    """Attention of some queries to some keys (token indexes). visible: bool [queries, keys], None for all. tail: keys
    that stand for blocks that are left out."""
    if keys.numel() == 0 and tail is None:
        return
    scores = scale * q[:, queries] @ k[:, keys].transpose(1, 2)
    values = v[:, keys]
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if tail is not None:
        scores = torch.cat([scores, tail.scores(q[:, queries], scale)], dim=-1)
        values = torch.cat([values, tail.v], dim=1)
        visible = None if visible is None else torch.nn.functional.pad(visible, (0, tail.v.shape[1]), value=True)
    row_lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - row_lse.masked_fill(row_lse == float("-inf"), 0.0)[..., None])
    rows = weights @ values
    if visible is not None and not values.isfinite().all():
        # A weight of 0 does not hide a NaN value; one that is attended to must reach the result.
        finite = values.isfinite()
        rows = weights @ values.masked_fill(~finite, 0.0)
        reached = visible.to(values.dtype) @ (~finite).to(values.dtype)
        rows = rows.masked_fill(reached > 0, float("nan"))
    out[heads[:, None], queries[None]] = rows
    lse[heads[:, None], queries[None]] = row_lse
