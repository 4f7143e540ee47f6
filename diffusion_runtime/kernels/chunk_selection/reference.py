"""The specification of chunk selection: in torch, by sorting, on any device.

arXiv:2506.23858, section 3: a query selects the chunks whose mean key scores highest with it, and always its own. The
gate of a query and a chunk is the product of the query and the mean key, without a scale. A group is the set of (head,
query, chunk) entries that are compared with each other; it never spans two samples. H heads, S queries in the order of
the chunks, C chunks.
"""

from __future__ import annotations

import torch

# Gates that are compared at a time, where groups are small enough to allow a choice.
_CHUNK = 1 << 25

GROUPS = ("query_head", "head_global", "overall", "block")


def select_chunks(
    q: torch.Tensor, means: torch.Tensor, own_chunk: torch.Tensor, *, group: str, top: int | None, threshold: float
) -> torch.Tensor:
    """bool [H, S, C]: what each query selects.

    q: [H, S, head_dim]; means: float32 [H, C, head_dim], of the key head that each query head uses; own_chunk: [S].
    group: one of GROUPS: the chunks of one query and head (`query_head`), all entries of a head (`head_global`), all
    entries (`overall`), all entries of a chunk (`block`, with a threshold alone).
    top: chunks a query keeps on average over its group, its own among them; None selects by `threshold`, the share of
    the group's gates that is kept.

    Among equal gates the lowest head comes first, then the first query in the order, then the lowest chunk. Memory
    grows with the group: `overall` sorts all H * S * C entries of a sample together.
    """
    own = own_chunk[:, None] == torch.arange(means.shape[1], device=q.device)
    if group == "block":
        assert top is None, "a number of chunks is a property of queries, not of a chunk"
        selected = _foreign_of_chunks(q, means, own, threshold)
    else:
        selected = _foreign_of_queries(q, means, own, group, top, threshold)
    return selected.logical_or_(own)


def _foreign_of_queries(
    q: torch.Tensor, means: torch.Tensor, own: torch.Tensor, group: str, top: int | None, threshold: float
) -> torch.Tensor:
    """Groups that hold whole queries, as many heads at a time as the group takes or the memory allows."""
    num_heads, (num_rows, num_chunks) = q.shape[0], own.shape
    selected = torch.empty(num_heads, num_rows, num_chunks, dtype=torch.bool, device=q.device)
    step = {"query_head": max(1, _CHUNK // (num_rows * num_chunks)), "head_global": 1, "overall": num_heads}[group]
    for start in range(0, num_heads, step):
        heads = slice(start, start + step)
        gates = _gates(q[heads], means[heads])
        shape = gates.shape
        own_entries = own.expand(shape)
        if group != "query_head":
            gates, own_entries = gates.reshape(1, -1), own_entries.reshape(1, -1)
        if top is None:
            kept = _foreign_by_share(gates, own_entries, threshold)
        else:
            kept = _best_foreign(gates, own_entries, (top - 1) * gates.shape[-1] // num_chunks)
        selected[heads] = kept.view(shape)
    return selected


def _foreign_of_chunks(q: torch.Tensor, means: torch.Tensor, own: torch.Tensor, threshold: float) -> torch.Tensor:
    """Groups that hold all queries of one chunk, as many chunks at a time as the memory allows."""
    num_heads, (num_rows, num_chunks) = q.shape[0], own.shape
    selected = torch.empty(num_heads, num_rows, num_chunks, dtype=torch.bool, device=q.device)
    step = max(1, _CHUNK // (num_heads * num_rows))
    for start in range(0, num_chunks, step):
        chunks = slice(start, start + step)
        gates = _gates(q, means[:, chunks]).permute(2, 0, 1).flatten(1)
        own_entries = own[:, chunks].T[:, None].expand(-1, num_heads, -1).flatten(1)
        kept = _foreign_by_share(gates, own_entries, threshold)
        selected[..., chunks] = kept.view(-1, num_heads, num_rows).permute(1, 2, 0)
    return selected


def _gates(q: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """float32 [H, S, C]."""
    return q.float() @ means.transpose(1, 2)


def _best_foreign(gates: torch.Tensor, own: torch.Tensor, count: int) -> torch.Tensor:
    """bool [..., n]: the `count` highest entries of each group that are not own ones."""
    ranked = gates.masked_fill(own, float("-inf"))
    index = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(own).scatter_(-1, index, True)


def _foreign_by_share(gates: torch.Tensor, own: torch.Tensor, threshold: float) -> torch.Tensor:
    """bool [..., n]: the highest entries of each group that, with all own ones, make up `threshold` of its gates.

    Gates count by how far they are above the lowest of the group. At least one foreign entry is kept where there is
    one, and all of them where the share is never reached.
    """
    low, high = gates.amin(dim=-1, keepdim=True), gates.amax(dim=-1, keepdim=True)
    spread = high - low
    height = torch.where(spread > 0, (gates - low) / spread, 0.0)
    # A group may hold hundreds of millions of entries, more than float32 can add up.
    total = height.sum(dim=-1, keepdim=True, dtype=torch.float64) + 1e-6
    kept_by_own = height.masked_fill(~own, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    missing = (threshold - kept_by_own / total).clamp(min=0.0) * total
    # Heights are 0 or more, so own entries come last.
    ranked, index = height.masked_fill(own, -1.0).sort(dim=-1, descending=True, stable=True)
    before = ranked.clamp(min=0.0).cumsum(dim=-1, dtype=torch.float64).roll(1, dims=-1)
    before[..., 0] = -1.0
    return torch.zeros_like(own).scatter_(-1, index, (before < missing) & (ranked >= 0.0))
