"""Sparse VideoGen 2: which key clusters hold most of the mass of a cluster of queries."""

from __future__ import annotations

import torch


def keep_most_mass(
    scores: torch.Tensor, sizes: torch.Tensor, top_p: float, minimum: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: float32 [R, q clusters, K], scaled products of centroids; sizes: int32 [R, K], keys in each cluster.

    The mass of a key cluster is its size times exp(score), as a share of the row. From the heaviest on, a cluster is
    kept while those before it hold at most `top_p`, and the first `minimum` always; equals go by index.

    Returns count int32 [R, q clusters] and index int32 [R, q clusters, K]: the kept ones ascending, then the others.
    """
    num_clusters = scores.shape[-1]
    # An empty cluster weighs exp(-inf) = 0, so it comes last and is never counted, whatever its old centroid holds.
    sizes = sizes[:, None]
    weights = torch.softmax(torch.where(sizes > 0, scores + sizes.to(scores.dtype).log(), float("-inf")), dim=-1)
    heaviest = weights.sort(dim=-1, descending=True, stable=True)
    before = torch.nn.functional.pad(heaviest.values[..., :-1].cumsum(dim=-1), (1, 0))
    keep = before <= top_p
    keep[..., :minimum] = True
    kept = torch.empty_like(keep).scatter_(-1, heaviest.indices, keep)
    rank = kept.cumsum(dim=-1, dtype=torch.int32)
    count = rank[..., -1]
    cluster = torch.arange(num_clusters, dtype=torch.int32, device=scores.device)
    # Each cluster knows its place, so the lists need no second sort and nothing has a size that the data decides.
    place = torch.where(kept, rank - 1, count[..., None] + cluster - rank)
    index = torch.empty_like(rank).scatter_(-1, place.long(), cluster.expand_as(rank))
    return count.contiguous(), index
