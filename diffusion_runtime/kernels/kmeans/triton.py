"""k-means in Triton: distances that are never written to memory, and sums without atomics.

Fused distance and argmin, and sums over sorted labels: flash-kmeans, arXiv:2603.09229.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from diffusion_runtime.kernels.kmeans.reference import Grouping

# Numbers that one step of the segment sums reads: 64 points of 128.
_SUM_STEP = 8192


@dataclass(frozen=True)
class AssignShape:
    """points: points per program; clusters: centroids per step; the rest are Triton's compile options."""

    points: int
    clusters: int
    num_warps: int
    num_stages: int


def refusal(points: torch.Tensor) -> str | None:
    """Return why this implementation cannot cluster points like these, or None."""
    if not (points.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"needs a CUDA GPU, the points are on {points.device}"
    if points.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, not {points.dtype}"
    if points.shape[-1] > 256:
        return f"takes head sizes up to 256, not {points.shape[-1]}"
    return None


def assign_shape(dtype: torch.dtype, width: int) -> AssignShape:
    """Several programs fit on a multiprocessor, so that one compares while another multiplies."""
    if dtype == torch.float32:
        return AssignShape(points=64, clusters=32, num_warps=4, num_stages=2)
    if width > 128:
        return AssignShape(points=128, clusters=64, num_warps=8, num_stages=2)
    return AssignShape(points=128, clusters=64, num_warps=4, num_stages=3)


def assign_triton(points: torch.Tensor, centroids: torch.Tensor, shape: AssignShape | None = None) -> torch.Tensor:
    """points: [B, H, S, D]; centroids: float32 [B * H, K, D]. Returns int32 [B * H, S] as the reference does.

    Two distances that are equal up to the rounding of a float32 sum may be ordered differently.
    """
    from diffusion_runtime.kernels.kmeans import triton_kernels as kernels

    points = _rows_in_one_piece(points)
    num_heads, num_points, head_dim = points.shape[1:]
    num_groups, num_clusters, _ = centroids.shape
    width = _width(head_dim)
    shape = assign_shape(points.dtype, width) if shape is None else shape
    # Padded to whole steps, so that the loop over centroids masks nothing; a padded centroid is infinitely far.
    num_rows = -(-num_clusters // shape.clusters) * shape.clusters
    rounded = points.new_empty(num_groups, num_rows, width)
    norms = centroids.new_empty(num_groups, num_rows)
    kernels.round_centroids[(num_rows // shape.clusters, num_groups)](
        centroids.contiguous(), rounded, norms, num_clusters, num_rows, D=head_dim, W=width, BLOCK=shape.clusters
    )
    labels = torch.empty(num_groups, num_points, dtype=torch.int32, device=points.device)
    kernels.assign[(num_groups, -(-num_points // shape.points))](
        points,
        rounded,
        norms,
        labels,
        num_points,
        num_heads,
        points.stride(0),
        points.stride(1),
        points.stride(2),
        K=num_clusters,
        ROWS=num_rows,
        D=head_dim,
        W=width,
        BLOCK_POINTS=shape.points,
        BLOCK_CLUSTERS=shape.clusters,
        PRECISION="ieee" if points.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return labels


def update_triton(points: torch.Tensor, grouping: Grouping, centroids: torch.Tensor) -> torch.Tensor:
    """points: [B, H, S, D]; centroids: float32 [B * H, K, D]. Returns the new centroids; deterministic."""
    from diffusion_runtime.kernels.kmeans import triton_kernels as kernels

    points = _rows_in_one_piece(points)
    num_groups, num_clusters, head_dim = centroids.shape
    width = _width(head_dim)
    updated = torch.empty_like(centroids, memory_format=torch.contiguous_format)
    kernels.average_clusters[(num_clusters, num_groups)](
        points,
        grouping.order,
        grouping.ends,
        centroids.contiguous(),
        updated,
        num_clusters,
        points.shape[1],
        points.stride(0),
        points.stride(1),
        points.stride(2),
        D=head_dim,
        W=width,
        BLOCK=_SUM_STEP // width,
        num_warps=4,
    )
    return updated


def _rows_in_one_piece(points: torch.Tensor) -> torch.Tensor:
    return points if points.stride(-1) == 1 else points.contiguous()


def _width(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())
