"""k-means on a CUDA GPU: in bfloat16 against the reference, without waiting for the device, the same in every run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kmeans_oracle import cluster_means, excess, inertia

from diffusion_runtime.kernels.kmeans.api import assign, lloyd, update

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Anything that waits for the device raises, from the moment the test asks for it."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def random_tokens(num_points: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, 3, num_points, head_dim], as two samples of three heads lie in a sequence."""
    torch.manual_seed(0)
    return torch.randn(2, num_points + 9, 3, head_dim, device="cuda").to(dtype)[:, 4 : num_points + 4].transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_points", "num_clusters"), [(1000, 100), (129, 65), (1, 1), (513, 7)])
def test_against_the_reference(dtype: torch.dtype, head_dim: int, num_points: int, num_clusters: int) -> None:
    points = random_tokens(num_points, head_dim, dtype)
    flat = points.reshape(6, num_points, head_dim)
    centroids = torch.randn(6, num_clusters, head_dim, device="cuda")
    labels = assign(points, centroids, implementation="triton")
    assert labels.min() >= 0
    assert labels.max() < num_clusters
    scale = (flat.double().square().sum(-1).max() + centroids.double().square().sum(-1).max()).item()
    assert excess(flat, centroids, labels).max() < 1e-6 * scale
    expected = assign(points, centroids, implementation="reference")
    found, best = (inertia(flat, centroids.to(dtype), x) for x in (labels, expected))
    assert ((found - best).abs() <= 1e-5 * best).all()
    updated, counts = update(points, labels, centroids, implementation="triton")
    assert (updated.double() - cluster_means(flat, labels, centroids)).abs().max() < 1e-4
    assert torch.equal(counts, update(points, labels, centroids, implementation="reference")[1])


def test_a_long_sequence_and_large_clusters() -> None:
    points = random_tokens(20000, 128, torch.bfloat16)
    centroids = points[:, :, torch.arange(0, 20000, 20, device="cuda")].flatten(0, 1).float()
    found = lloyd(points, centroids, 3, implementation="triton")
    expected = lloyd(points, centroids, 3, implementation="reference")
    flat = points.reshape(6, 20000, 128)
    ours, theirs = (inertia(flat, result.centroids, result.labels) for result in (found, expected))
    assert ((ours - theirs).abs() < 1e-3 * theirs).all()
    assert found.counts.sum(dim=1).tolist() == [20000] * 6
    single = torch.zeros(6, 20000, dtype=torch.int32, device="cuda")
    updated, _ = update(points, single, centroids[:, :2].contiguous())
    assert (updated[:, 0] - flat.float().mean(dim=1)).abs().max() < 1e-4
    assert torch.equal(updated[:, 1], centroids[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    points = torch.randint(-3, 4, (1, 500, 64), device="cuda").to(dtype)
    centroids = torch.randint(-3, 4, (1, 200, 64), device="cuda").float()
    centroids[:, [20, 21, 90, 199]] = centroids[:, 10:11].clone()
    points[:, :9] = centroids[:, 10:11]
    labels = assign(points, centroids, implementation="triton")
    assert torch.equal(labels, assign(points, centroids, implementation="reference"))
    assert (labels[:, :9] == 10).all()


def test_nothing_waits_for_the_device(no_waiting: None) -> None:
    points = random_tokens(3000, 128, torch.bfloat16)
    centroids = torch.randn(6, 100, 128, device="cuda")
    expected = lloyd(points, centroids, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = lloyd(points, centroids, 3)
    torch.cuda.set_sync_debug_mode("default")
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs), "two runs are the same to the bit"


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_in_range(dtype: torch.dtype) -> None:
    points = random_tokens(700, 128, dtype).clone()
    centroids = torch.randn(6, 90, 128, device="cuda")
    clean = assign(points, centroids)
    points[0, 0, 5], points[0, 0, 9, 1], points[1, 1, 3] = float("nan"), float("inf"), float("-inf")
    centroids[3, 7] = float("nan")
    labels = assign(points, centroids)
    assert labels.min() >= 0
    assert labels.max() < 90
    assert (labels[3] != 7).all()
    assert torch.equal(labels[[1, 2, 5]], clean[[1, 2, 5]])
    result = lloyd(points, centroids, 3)
    assert result.labels.min() >= 0
    assert result.labels.max() < 90
    assert result.counts.sum(dim=1).tolist() == [700] * 6


def test_points_of_full_size_use_no_more_memory_than_they_must() -> None:
    """The distances of one assignment would be 2.4 GB; labels, order and keys are megabytes."""
    points = torch.randn(1, 75600, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    centroids = torch.randn(8, 1000, 128, device="cuda")
    lloyd(points, centroids, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lloyd(points, centroids, 2)
    assert torch.cuda.max_memory_allocated() - before < 200 * 2**20
