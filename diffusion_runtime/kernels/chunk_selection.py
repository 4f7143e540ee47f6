"""Chunk selection (arXiv:2506.23858, section 3): a query selects the chunks whose mean key scores highest with it, and
always its own. By sorting in torch, or in Triton for groups of one query.

The gate of a query and a chunk is the product of the query and the mean key, without a scale. A group is the set of
(head, query, chunk) entries that are compared with each other; it never spans two samples. H heads, S queries in the
order of the chunks, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse.row_masks import packed_bits
from diffusion_runtime.kernels.block_sparse.triton import is_interpreted, refusal_of_size

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


@dataclass(frozen=True)
class SelectionRule:
    """group: which gates are compared with each other, one of GROUPS, see select_chunks.
    top: chunks a query keeps on average over its group, its own among them; None selects by `threshold`, the share of
    the group's gates that is kept.
    """

    group: str
    top: int | None
    threshold: float


def chunk_row_mask(
    q: torch.Tensor, means: torch.Tensor, order: torch.Tensor, chunk_of_row: torch.Tensor, rule: SelectionRule
) -> torch.Tensor:
    """int32 [B, H, S, words], the row mask of a SparsePlan: which chunks each query selects, its own among them.

    q: [B, seq, H, head_dim]; means: float32 [B, kv_heads, C, head_dim], of each chunk's keys; order: int32 [seq], of
    which the first S are the grid's tokens chunk by chunk; chunk_of_row: int64 [S], their chunks. The gate of a query
    and a chunk is q . mean, without a scale. Deterministic, and without a device synchronisation.

    Raises ConfigError when the shapes do not fit, or the rule is not one.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    fits = (
        means.shape[0] == batch
        and means.shape[3] == head_dim
        and num_heads % max(1, means.shape[1]) == 0
        and order.shape == (num_tokens,)
        and chunk_of_row.shape[0] <= num_tokens
    )
    if not fits:
        raise ConfigError(
            f"chunk selection: expected means [{batch}, a divisor of {num_heads}, chunks, {head_dim}] and an order "
            f"[{num_tokens}], got {tuple(means.shape)} and {tuple(order.shape)}"
        )
    if rule.group not in GROUPS or (rule.group, rule.top is None) == ("block", False):
        raise ConfigError(
            f"chunk selection: expected a group of {', '.join(GROUPS)}, block with a threshold alone, got {rule}"
        )
    if refusal(q, means, rule.group) is None:
        return chunk_row_mask_triton(q, means, order, chunk_of_row, top=rule.top, threshold=rule.threshold)
    return chunk_row_mask_reference(q, means, order, chunk_of_row, rule)


def chunk_row_mask_reference(
    q: torch.Tensor, means: torch.Tensor, order: torch.Tensor, chunk_of_row: torch.Tensor, rule: SelectionRule
) -> torch.Tensor:
    """Implement chunk_row_mask sample by sample: groups never span two."""
    in_order = order[: chunk_of_row.shape[0]].long()
    repeats = q.shape[2] // means.shape[1]
    return torch.stack(
        [
            packed_bits(
                select_chunks(
                    q[sample, in_order].transpose(0, 1),
                    means[sample].repeat_interleave(repeats, dim=0),
                    chunk_of_row,
                    group=rule.group,
                    top=rule.top,
                    threshold=rule.threshold,
                )
            )
            for sample in range(q.shape[0])
        ]
    )


# Chunks whose gates a program holds for 16 queries.
MAXIMUM_CHUNKS = 1024


def refusal(q: torch.Tensor, means: torch.Tensor, group: str) -> str | None:
    """Return why this implementation cannot select chunks for tensors like q, or None."""
    if group != "query_head":
        return f"compares the chunks of one query (query_head), not {group}"
    if means.shape[2] > MAXIMUM_CHUNKS:
        return f"takes up to {MAXIMUM_CHUNKS} chunks, not {means.shape[2]}"
    return refusal_of_size(q, q.shape[1])


def chunk_row_mask_triton(
    q: torch.Tensor,
    means: torch.Tensor,
    order: torch.Tensor,
    chunk_of_row: torch.Tensor,
    *,
    top: int | None,
    threshold: float,
) -> torch.Tensor:
    """Implement chunk_row_mask for the group query_head."""
    import triton.language as tl

    from diffusion_runtime.kernels import chunk_selection_triton as kernels

    q = q if q.stride(3) == 1 else q.contiguous()
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads, num_chunks = means.shape[1:3]
    num_rows, words = chunk_of_row.shape[0], -(-num_chunks // 32)
    row_mask = torch.empty(batch, num_heads, num_rows, words, dtype=torch.int32, device=q.device)
    chunks = max(32, 1 << (num_chunks - 1).bit_length())
    by_share = top is None
    # Gates that a thread holds: 64, or 32 next to sums in float64; more of them do not fit the registers of sm_90.
    rows = max(16, min(64, (8192 if by_share else 16384) // chunks))
    num_warps = max(4, rows * chunks // (1024 if by_share else 2048))
    kernels.select_rows[(-(-num_rows // rows), batch * num_heads)](
        q,
        means.contiguous(),
        order,
        chunk_of_row,
        row_mask,
        num_rows,
        num_chunks,
        num_heads,
        num_heads // num_kv_heads,
        words,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        0 if top is None else top - 1,
        D=head_dim,
        DIMS=max(16, min(32, 8192 // chunks)),
        ROWS=rows,
        CHUNKS=chunks,
        BY_SHARE=by_share,
        THRESHOLD=float(threshold),
        SPLIT=q.dtype == torch.bfloat16,
        # The interpreter multiplies the bit patterns of bfloat16.
        FACTOR=tl.float32 if is_interpreted() else tl.bfloat16,
        num_warps=num_warps,
    )
    return row_mask
