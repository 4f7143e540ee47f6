"""The specification of top-k with deterministic ties, in torch, on any device."""

from __future__ import annotations

import torch


def highest_reference(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """scores: [..., N]. Returns int32 [..., num_kept], ascending; the lowest index wins a tie, and a NaN is lowest."""
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    # topk leaves open which of several equal scores it takes, so it gives the lowest kept score alone.
    lowest = scores.topk(num_kept, dim=-1).values[..., -1:]
    above = scores > lowest
    level = scores == lowest
    room = num_kept - above.sum(dim=-1, keepdim=True, dtype=torch.int32)
    keep = above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))
    # What is not kept goes into one slot too many, which is cut off.
    slot = torch.where(keep, keep.cumsum(dim=-1, dtype=torch.int32) - 1, num_kept).long()
    index = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device).expand_as(slot)
    kept = torch.zeros(*scores.shape[:-1], num_kept + 1, dtype=torch.int32, device=scores.device)
    return kept.scatter_(-1, slot, index)[..., :num_kept]
