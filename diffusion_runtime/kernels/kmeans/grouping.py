"""Points grouped by cluster label, by one sort."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Grouping(NamedTuple):
    """order: int32 [G, S], the points of cluster 0 first, then those of cluster 1, ..., by index inside a cluster.

    ends: int64 [G * K + 1], where the clusters of all groups begin and end in the flattened order.
    counts: int32 [G, K], points in each cluster.
    """

    order: torch.Tensor
    ends: torch.Tensor
    counts: torch.Tensor


def group_by_label(labels: torch.Tensor, num_clusters: int) -> Grouping:
    """labels: int32 [G, S] in 0 .. num_clusters - 1. The same order on every device, without a synchronisation.

    One sort over all groups: a radix sort of 32-bit keys is stable and does not need the sizes.
    """
    num_groups, num_points = labels.shape
    first_cluster = torch.arange(num_groups, device=labels.device, dtype=torch.int32)[:, None] * num_clusters
    keys, order = torch.sort((labels + first_cluster).flatten(), stable=True)
    bounds = torch.arange(num_groups * num_clusters + 1, device=labels.device, dtype=torch.int32)
    ends = torch.searchsorted(keys, bounds)
    first_point = torch.arange(num_groups, device=labels.device)[:, None] * num_points
    return Grouping(
        order=(order.view(num_groups, num_points) - first_point).to(torch.int32),
        ends=ends,
        counts=ends.diff().view(num_groups, num_clusters).to(torch.int32),
    )
