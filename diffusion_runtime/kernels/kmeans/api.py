"""k-means: checks, the choice of the implementation, and Lloyd's iterations.

Lloyd, "Least squares quantization in PCM", 1982; the warm start and the early stop are those of Sparse VideoGen 2,
arXiv:2505.18875. No CUDA device is synchronised with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.kmeans import triton
from diffusion_runtime.kernels.kmeans.reference import Grouping, assign_reference, group_by_label, update_reference

IMPLEMENTATIONS = ("reference", "triton")


class KMeansResult(NamedTuple):
    """centroids: float32 [G, K, D]; labels: int32 [G, S]; counts: int32 [G, K], points of each label.

    order: int32 [G, S], the points cluster by cluster, by index inside a cluster.
    labels, counts and order are those of the assignment that the last update was made from.
    """

    centroids: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    order: torch.Tensor


def assign(points: torch.Tensor, centroids: torch.Tensor, *, implementation: str = "auto") -> torch.Tensor:
    """Return the nearest centroid of each point by Euclidean distance, the lowest index among equals: int32 [G, S].

    points: [G, S, D], or [B, H, S, D] for G = B * H, which saves the copy of a strided view; float64, float32, float16
    or bfloat16. centroids: float32 [G, K, D]; they are rounded to the points' dtype. implementation: one of
    IMPLEMENTATIONS; `auto` is the fastest that runs here. A NaN point gets any valid label. Raises ConfigError for
    shapes and dtypes that do not fit, and an implementation that cannot run.
    """
    grouped = _check(points, centroids)
    return _assign(grouped, centroids, _choose(implementation, grouped))


def update(
    points: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor, *, implementation: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of each cluster's points, float32 [G, K, D], and their number, int32 [G, K].

    labels: int32 [G, S] in 0 .. K - 1; see `assign` for the rest. A cluster without points keeps its centroid.
    """
    grouped = _check(points, centroids)
    if labels.shape != (centroids.shape[0], grouped.shape[2]) or labels.dtype != torch.int32:
        raise ConfigError(
            f"k-means: expected int32 labels {(centroids.shape[0], grouped.shape[2])} (groups, points), got "
            f"{labels.dtype} {tuple(labels.shape)}"
        )
    grouping = group_by_label(labels, centroids.shape[1])
    return _update(grouped, labels, grouping, centroids, _choose(implementation, grouped)), grouping.counts


def lloyd(
    points: torch.Tensor,
    centroids: torch.Tensor,
    num_iterations: int,
    tolerance: float = 1e-4,
    *,
    implementation: str = "auto",
) -> KMeansResult:
    """`num_iterations` times an assignment and an update, starting from `centroids`; see `assign` for the arguments.

    A group stops, and keeps its centroids, as soon as none of them would move by `tolerance` or more; the other groups
    go on, so no group depends on the others in the batch. 0 iterations: the centroids stay, points are labelled.
    """
    grouped = _check(points, centroids)
    if num_iterations < 0:
        raise ConfigError(f"k-means: expected 0 iterations or more, got {num_iterations}")
    chosen = _choose(implementation, grouped)
    stopped = torch.zeros(centroids.shape[0], dtype=torch.bool, device=centroids.device)
    labels = _assign(grouped, centroids, chosen)
    grouping = group_by_label(labels, centroids.shape[1])
    for iteration in range(num_iterations):
        if iteration > 0:
            labels = _assign(grouped, centroids, chosen)
            grouping = group_by_label(labels, centroids.shape[1])
        updated = _update(grouped, labels, grouping, centroids, chosen)
        shift = torch.linalg.vector_norm(updated - centroids, dim=-1).amax(dim=-1)
        stopped = stopped | (shift < tolerance)
        centroids = torch.where(stopped[:, None, None], centroids, updated)
        # Stopping early would need a device synchronisation; going on changes nothing, because nothing moves any more.
        if centroids.device.type == "cpu" and bool(stopped.all()):
            break
    return KMeansResult(centroids, labels, grouping.counts, grouping.order)


def _assign(points: torch.Tensor, centroids: torch.Tensor, chosen: str) -> torch.Tensor:
    return (triton.assign_triton if chosen == "triton" else assign_reference)(points, centroids)


def _update(
    points: torch.Tensor, labels: torch.Tensor, grouping: Grouping, centroids: torch.Tensor, chosen: str
) -> torch.Tensor:
    if chosen == "triton":
        return triton.update_triton(points, grouping, centroids)
    return update_reference(points, labels, grouping.counts, centroids)


def _choose(implementation: str, points: torch.Tensor) -> str:
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(f"implementation: expected auto, {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation == "reference":
        return "reference"
    reason = triton.refusal(points)
    if reason is None:
        return "triton"
    if implementation == "triton":
        raise ConfigError(f"k-means implementation 'triton' cannot run here: {reason}; use auto")
    return "reference"


def _check(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Check the points and return them as [B, H, S, D]."""
    grouped = points[None] if points.dim() == 3 else points
    fits = grouped.dim() == 4 and centroids.dim() == 3 and 0 not in (*points.shape, *centroids.shape)
    if not fits or centroids.shape[0] != grouped.shape[0] * grouped.shape[1] or centroids.shape[2] != grouped.shape[3]:
        raise ConfigError(
            f"k-means: expected points [groups, points, head_dim] and centroids [groups, clusters, head_dim], none of "
            f"them empty, got {tuple(points.shape)} and {tuple(centroids.shape)}"
        )
    if centroids.dtype != torch.float32 or not points.is_floating_point():
        raise ConfigError(
            f"k-means: expected floating points and float32 centroids, got {points.dtype} and {centroids.dtype}"
        )
    if centroids.device != points.device:
        raise ConfigError(f"k-means: points are on {points.device}, centroids on {centroids.device}; use one device")
    return grouped
