"""Chunk selection: checks, and the choice of the implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse.row_masks import packed_bits
from diffusion_runtime.kernels.chunk_selection import triton
from diffusion_runtime.kernels.chunk_selection.reference import GROUPS, select_chunks


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
    if triton.refusal(q, means, rule.group) is None:
        return triton.chunk_row_mask_triton(q, means, order, chunk_of_row, top=rule.top, threshold=rule.threshold)
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
