"""The specification of k-means: eager, float32 (float64 for float64 points), on any device.

Distances are computed for a few points at a time: all of them would be S x K numbers per group, tens of gigabytes for a
video.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Distances held at once: 16 MiB of float32.
_DISTANCES_AT_ONCE = 1 << 22


def assign_reference(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """points: [B, H, S, D]; centroids: [B * H, K, D]. Returns the nearest centroid of each point, int32 [B * H, S].

    Centroids are rounded to the points' dtype first. |p - c|^2 is compared without |p|^2, which all centroids share.
    Ties, to the rounding of a float32 sum, go to the lowest index. A NaN distance is the farthest.
    """
    working = _working_dtype(points)
    num_groups, num_clusters, _ = centroids.shape
    rounded = centroids.to(points.dtype).to(working)
    norms = rounded.square().sum(dim=-1)
    labels = torch.empty(num_groups, points.shape[2], dtype=torch.int32, device=points.device)
    num_rows = max(1, _DISTANCES_AT_ONCE // num_clusters)
    for group in range(num_groups):
        members = points[divmod(group, points.shape[1])]
        for start in range(0, members.shape[0], num_rows):
            chunk = members[start : start + num_rows].to(working)
            distances = norms[group] - 2.0 * chunk @ rounded[group].T
            distances = distances.masked_fill_(distances.isnan(), float("inf"))
            labels[group, start : start + num_rows] = distances.argmin(dim=1)
    return labels


def update_reference(
    points: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, centroids: torch.Tensor
) -> torch.Tensor:
    """points: [B, H, S, D]; labels: int32 [B * H, S]; counts: int32 [B * H, K]; centroids: float32 [B * H, K, D].

    Returns the mean of each cluster's points, float32, and the centroid as it was for a cluster without points.
    """
    updated = centroids.clone()
    for group in range(centroids.shape[0]):
        members = points[divmod(group, points.shape[1])].to(_working_dtype(points))
        sums = members.new_zeros(centroids.shape[1:]).index_add_(0, labels[group].long(), members)
        sizes = counts[group, :, None]
        updated[group] = torch.where(sizes > 0, (sums / sizes.clamp(min=1)).to(centroids.dtype), centroids[group])
    return updated


def _working_dtype(points: torch.Tensor) -> torch.dtype:
    return torch.promote_types(points.dtype, torch.float32)


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
