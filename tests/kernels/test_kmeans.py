"""k-means on a CPU against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from kmeans_oracle import cluster_means, excess, inertia, squared_distances

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.kmeans.api import assign, lloyd, update
from diffusion_runtime.kernels.kmeans.reference import group_by_label

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def random_points(
    groups: int = 3, points: int = 200, dim: int = 16, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(groups, points, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_point_goes_to_its_nearest_centroid(dtype: torch.dtype) -> None:
    points, centroids = random_points(dtype=dtype), random_points(points=23, seed=1)
    labels = assign(points, centroids)
    assert labels.dtype == torch.int32
    assert labels.shape == (3, 200)
    assert excess(points, centroids, labels).max() < 1e-5


def test_more_distances_than_exist_at_once() -> None:
    points, centroids = random_points(2, 6000, 4), random_points(2, 1500, 4, seed=1)
    assert torch.equal(assign(points, centroids), squared_distances(points, centroids).argmin(2).int())


def test_the_distances_never_exist_together() -> None:
    """20000 points and 1000 centroids would need 80 MB."""
    points, centroids = random_points(1, 20000), random_points(1, 1000, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assign(points, centroids)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 2**20 < largest <= 17 * 2**20


def test_equals_go_to_the_lowest_index() -> None:
    """Whole numbers, so that a sum is exact in any order."""
    points = (4 * random_points()).round()
    centroids = (4 * random_points(points=9, seed=1)).round()
    centroids[:, 4:6] = centroids[:, 2:3]
    labels = assign(points, centroids)
    assert torch.equal(labels, squared_distances(points, centroids).argmin(2).int())
    assert not ((labels == 4) | (labels == 5)).any()
    assert (labels == 2).any()
    assert (assign(points, centroids[:, :1].expand(-1, 7, -1)) == 0).all()


def test_centroids_are_rounded_to_the_dtype_of_the_points() -> None:
    """The second centroid is nearer as it stands, and as far as the first when it is rounded."""
    points = torch.tensor([[[1.0078125, 0.0]]], dtype=torch.bfloat16)
    centroids = torch.tensor([[[1.0, 0.0], [1.0 + 1e-3, 0.0]]])
    assert assign(points.float(), centroids).item() == 1
    assert assign(points, centroids).item() == 0


def test_a_strided_view_with_batch_and_heads_is_the_same() -> None:
    tokens = torch.randn(2, 50, 3, 8, generator=torch.Generator().manual_seed(0))
    strided, copied = tokens.transpose(1, 2), tokens.transpose(1, 2).reshape(6, 50, 8)
    centroids = random_points(6, 7, 8, seed=1)
    for result, expected in zip(lloyd(strided, centroids, 3), lloyd(copied, centroids, 3), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_centroid_becomes_the_mean_of_its_points_and_an_empty_one_stays(dtype: torch.dtype) -> None:
    points, centroids = random_points(dtype=dtype), random_points(points=6, seed=1)
    labels = torch.randint(0, 6, (3, 200), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    labels[labels == 0], labels[1, labels[1] == 5] = 3, 4
    updated, counts = update(points, labels, centroids)
    assert updated.dtype == torch.float32
    assert torch.allclose(updated.double(), cluster_means(points, labels, centroids), atol=1e-5)
    assert torch.equal(updated[:, 0], centroids[:, 0])
    assert torch.equal(updated[1, 5], centroids[1, 5])
    assert counts.dtype == torch.int32
    assert counts.tolist() == [[(row == cluster).sum().item() for cluster in range(6)] for row in labels]


def test_points_are_grouped_by_cluster_and_by_index_inside() -> None:
    labels = torch.randint(0, 5, (4, 60), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    labels[labels == 2] = 3
    grouping = group_by_label(labels, 7)
    for group in range(4):
        expected = [point for cluster in range(7) for point in range(60) if labels[group, point] == cluster]
        assert grouping.order[group].tolist() == expected
    assert grouping.counts.sum(dim=1).tolist() == [60] * 4
    assert grouping.counts[:, [2, 5, 6]].sum() == 0
    assert grouping.ends[::7].tolist() == [0, 60, 120, 180, 240]


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_lloyd_is_that_many_assignments_and_updates(iterations: int) -> None:
    points, centroids = random_points(), random_points(points=12, seed=1)
    result = lloyd(points, centroids, iterations, tolerance=0.0)
    for _ in range(iterations):
        labels = assign(points, centroids)
        centroids, counts = update(points, labels, centroids)
    assert torch.equal(result.centroids, centroids)
    assert torch.equal(result.labels, labels), "labels are those that the last update was made from"
    assert torch.equal(result.counts, counts)
    assert torch.equal(result.labels.gather(1, result.order.long()), result.labels.sort(dim=1, stable=True).values)


def test_no_iterations_label_the_points_and_leave_the_centroids() -> None:
    points, centroids = random_points(), random_points(points=12, seed=1)
    result = lloyd(points, centroids, 0)
    assert torch.equal(result.centroids, centroids)
    assert torch.equal(result.labels, assign(points, centroids))
    assert result.counts.sum(dim=1).tolist() == [200] * 3


def test_inertia_never_grows() -> None:
    points, centroids = random_points(), random_points(points=12, seed=1)
    results = [lloyd(points, centroids, iterations, tolerance=0.0) for iterations in range(1, 9)]
    course = torch.stack([inertia(points, result.centroids, result.labels) for result in results])
    assert (course.diff(dim=0) <= 1e-9).all()
    assert (course[-1] < 0.95 * course[0]).all()


def test_a_group_that_has_settled_stops_alone() -> None:
    """Group 0 starts at the means of two far clouds, shifted by less than the tolerance; group 1 at random."""
    cloud = random_points(1, 100, 4) * 0.1
    settled = torch.cat([cloud - 50, cloud + 50], dim=1)
    means = torch.stack([settled[0, :100].mean(0), settled[0, 100:].mean(0)])
    points = torch.cat([settled, random_points(1, 200, 4, seed=1)])
    start = torch.stack([means + 1e-3, points[1, :2]])
    result = lloyd(points, start, 6, tolerance=1e-2)
    assert torch.equal(result.centroids[0], start[0]), "the centroids before the update that was too small"
    assert torch.equal(result.labels[0], assign(points[:1], start[:1])[0])
    assert torch.equal(result.centroids[1], lloyd(points[1:], start[1:], 6, tolerance=1e-2).centroids[0])
    assert not torch.allclose(result.centroids[1], start[1], atol=1e-2)
    assert not torch.equal(lloyd(points, start, 6, tolerance=1e-5).centroids[0], start[0])


def test_nan_and_infinity_get_labels_in_range_and_spoil_no_other_group() -> None:
    points, centroids = random_points(), random_points(points=12, seed=1)
    clean = lloyd(points, centroids, 4)
    points[0, 3], points[0, 7, 2], points[0, 11] = float("nan"), float("inf"), float("-inf")
    spoiled = lloyd(points, centroids, 4)
    assert spoiled.labels.min() >= 0
    assert spoiled.labels.max() < 12
    assert torch.equal(spoiled.centroids[1:], clean.centroids[1:])
    assert spoiled.centroids[0].isnan().any(), "what is not a number shows"


def test_a_centroid_that_is_not_a_number_attracts_nothing() -> None:
    points, centroids = random_points(), random_points(points=12, seed=1)
    centroids[:, 5] = float("nan")
    labels = assign(points, centroids)
    others = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], dtype=torch.int32)
    assert torch.equal(labels, others[assign(points, centroids[:, others.long()]).long()])


def test_arguments_that_do_not_fit() -> None:
    points, centroids = random_points(), random_points(points=12, seed=1)
    for wrong_points, wrong_centroids in [
        (points[0], centroids),
        (points[:2], centroids),
        (points[..., :8], centroids),
        (points[:, :0], centroids),
        (points, centroids[:, :0]),
        (points.int(), centroids),
        (points, centroids.double()),
    ]:
        with pytest.raises(ConfigError, match="k-means: expected"):
            assign(wrong_points, wrong_centroids)
    with pytest.raises(ConfigError, match="expected int32 labels"):
        update(points, assign(points, centroids).long(), centroids)
    with pytest.raises(ConfigError, match="0 iterations or more"):
        lloyd(points, centroids, -1)
    with pytest.raises(ConfigError, match="expected auto, reference, triton, got 'cuda'"):
        assign(points, centroids, implementation="cuda")
    with pytest.raises(ConfigError, match="'triton' cannot run here: needs a CUDA GPU"):
        assign(points, centroids, implementation="triton")
