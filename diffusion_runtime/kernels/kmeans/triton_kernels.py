"""The Triton kernels of k-means. Shapes: B batch, H heads, G = B * H, S points, K clusters, D head_dim, W its power
of two. Importing this file needs Triton."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_centroids(
    centroids, rounded, norms, num_clusters, num_rows, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """rounded [G, num_rows, W]: centroids [G, K, D] in the points' dtype, padded with 0; norms [G, num_rows]: the
    squared length of what is stored there, infinite for padding. Grid: (num_rows / BLOCK, G)."""
    group = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, W)
    real = rows < num_clusters
    source = centroids + (group * num_clusters + rows)[:, None] * D + columns[None, :]
    values = tl.load(source, mask=real[:, None] & (columns < D)[None, :], other=0.0).to(rounded.dtype.element_ty)
    tl.store(rounded + (group * num_rows + rows)[:, None] * W + columns[None, :], values)
    wide = values.to(tl.float32)
    tl.store(norms + group * num_rows + rows, tl.where(real, tl.sum(wide * wide, axis=1), float("inf")))


@triton.jit
def assign(
    points,
    rounded,
    norms,
    labels,
    num_points,
    num_heads,
    stride_b,
    stride_h,
    stride_s,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_POINTS: tl.constexpr,
    BLOCK_CLUSTERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """labels [G, S]: the nearest of rounded [G, ROWS, W] for each of points [B, H, S, D].

    Grid: (G, ceil(S / BLOCK_POINTS)): programs that run together read the heads of the same tokens, which are
    neighbours in memory. Only a distance that is smaller wins, so a NaN leaves label 0.
    """
    group = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_POINTS + tl.arange(0, BLOCK_POINTS)
    columns = tl.arange(0, W)
    members = points + (group // num_heads).to(tl.int64) * stride_b + (group % num_heads).to(tl.int64) * stride_h
    inside = rows < num_points
    tile = tl.load(
        members + rows[:, None].to(tl.int64) * stride_s + columns[None, :],
        mask=inside[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    clusters = tl.arange(0, BLOCK_CLUSTERS)
    first_row = group.to(tl.int64) * ROWS
    sources = rounded + first_row * W + clusters[:, None] * W + columns[None, :]
    best = tl.full([BLOCK_POINTS], float("inf"), tl.float32)
    label = tl.zeros([BLOCK_POINTS], tl.int32)
    for start in range(0, ROWS, BLOCK_CLUSTERS):
        chunk = tl.load(sources + start * W)
        norm = tl.load(norms + first_row + start + clusters)
        distance = norm[None, :] - 2.0 * tl.dot(tile, tl.trans(chunk), input_precision=PRECISION)
        nearest = tl.min(distance, axis=1)
        # The lowest column that holds the minimum: a reduction of pairs would break ties by the order of threads.
        column = tl.min(tl.where(distance == nearest[:, None], clusters[None, :], BLOCK_CLUSTERS - 1), axis=1)
        closer = nearest < best
        label = tl.where(closer, start + column, label)
        best = tl.where(closer, nearest, best)
    tl.store(labels + group.to(tl.int64) * num_points + rows, tl.minimum(label, K - 1), mask=inside)


@triton.jit
def average_clusters(
    points,
    order,
    ends,
    centroids,
    updated,
    num_clusters,
    num_heads,
    stride_b,
    stride_h,
    stride_s,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """updated [G, K, D]: the mean of a cluster's points, or its centroid when it has none. Grid: (K, G).

    order: int32 [G * S]; ends: [G * K + 1]. One program sums one cluster in order, so every run gives the same sum.
    """
    group = tl.program_id(1).to(tl.int64)
    cluster = group * num_clusters + tl.program_id(0)
    columns = tl.arange(0, W)
    real = columns < D
    members = points + (group // num_heads) * stride_b + (group % num_heads) * stride_h
    start = tl.load(ends + cluster)
    stop = tl.load(ends + cluster + 1)
    total = tl.zeros([W], tl.float32)
    position = start
    # Not range(): its bounds are read on the device, which Triton 3.6's interpreter cannot do with NumPy 2.4.
    while position < stop:
        places = position + tl.arange(0, BLOCK)
        inside = places < stop
        index = tl.load(order + places, mask=inside, other=0).to(tl.int64)
        rows = tl.load(
            members + index[:, None] * stride_s + columns[None, :], mask=inside[:, None] & real[None, :], other=0.0
        )
        total += tl.sum(rows.to(tl.float32), axis=0)
        position += BLOCK
    size = (stop - start).to(tl.float32)
    old = tl.load(centroids + cluster * D + columns, mask=real, other=0.0)
    tl.store(updated + cluster * D + columns, tl.where(size > 0, total / tl.maximum(size, 1.0), old), mask=real)
