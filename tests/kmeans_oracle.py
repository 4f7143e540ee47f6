"""What k-means is judged against: distances in float64, all of them at once."""

from __future__ import annotations

import torch


def squared_distances(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """points: [G, S, D]; centroids: [G, K, D], rounded to the points' dtype first. Returns float64 [G, S, K]."""
    rounded = centroids.to(points.dtype).double()
    return torch.stack([(p.double()[:, None] - c[None]).square().sum(-1) for p, c in zip(points, rounded, strict=True)])


def excess(points: torch.Tensor, centroids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """float64 [G, S]: how much farther the labelled centroid is than the nearest one, in squared distance."""
    distances = squared_distances(points, centroids)
    return distances.gather(2, labels.long()[..., None])[..., 0] - distances.amin(dim=2)


def inertia(points: torch.Tensor, centroids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """float64 [G]: the sum of squared distances between points and their centroids."""
    chosen = centroids.double().gather(1, labels.long()[..., None].expand(-1, -1, centroids.shape[2]))
    return (points.double() - chosen).square().sum(dim=(1, 2))


def cluster_means(points: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """float64 [G, K, D]: the mean of each cluster's points, the centroid where there are none."""
    means = centroids.double().clone()
    for group in range(points.shape[0]):
        for cluster in range(centroids.shape[1]):
            members = points[group, labels[group] == cluster]
            if len(members):
                means[group, cluster] = members.double().mean(dim=0)
    return means
