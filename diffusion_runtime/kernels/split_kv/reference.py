"""The specification of merging attention to parts of the keys, in torch."""

from __future__ import annotations

import torch


def merge_parts(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As in api.py."""
    working = torch.promote_types(partial.dtype, torch.float32)
    batch = out.shape[0]
    by_part = lse.to(working).view(batch, -1, *lse.shape[1:])
    merged = torch.logsumexp(by_part, dim=1)
    # A row without keys, all of whose parts are 0; otherwise -inf minus -inf.
    weights = (by_part - merged.masked_fill(merged == -torch.inf, 0.0)[:, None]).exp()
    weighted = partial.to(working).view(batch, -1, *partial.shape[1:]) * weights.transpose(2, 3)[..., None]
    out.copy_(weighted.sum(dim=1))
    return merged.to(lse.dtype)
