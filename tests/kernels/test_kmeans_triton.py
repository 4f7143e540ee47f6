"""The Triton kernels of k-means under Triton's interpreter, which runs them on a CPU, against the reference.

The interpreter must be chosen before Triton is imported, so this file runs itself in a process of its own. bfloat16 is
left to a GPU: the interpreter's products of it are wrong.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from kmeans_oracle import excess
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.kernels.kmeans.api import KMeansResult, assign, lloyd, update

DTYPES = {"float32": torch.float32, "float16": torch.float16}


def check_labels(points: torch.Tensor, centroids: torch.Tensor, labels: torch.Tensor) -> None:
    """The nearest centroid, unless two are as near as a float32 sum can tell."""
    assert labels.dtype == torch.int32
    assert labels.min() >= 0
    assert labels.max() < centroids.shape[1]
    scale = points.double().square().sum(-1).max() + centroids.double().square().sum(-1).max()
    assert excess(points, centroids, labels).max() <= 1e-6 * scale


def check_shape(dtype: str, head_dim: int, num_points: int, num_clusters: int, again: bool = False) -> None:
    """Two samples of two heads, as they lie in a sequence with other tokens around them.

    again: the same points in a tensor of their own get the same labels, and a second update the same bits.
    """
    torch.manual_seed(0)
    tokens = torch.randn(2, num_points + 7, 2, head_dim).to(DTYPES[dtype])
    points = tokens[:, 3 : num_points + 3].transpose(1, 2)
    flat = points.reshape(4, num_points, head_dim)
    centroids = torch.randn(4, num_clusters, head_dim)
    labels = assign(points, centroids, implementation="triton")
    check_labels(flat, centroids, labels)
    updated, counts = update(points, labels, centroids, implementation="triton")
    expected, expected_counts = update(points, labels, centroids, implementation="reference")
    assert torch.allclose(updated, expected, atol=1e-5)
    assert torch.equal(counts, expected_counts)
    if again:
        assert torch.equal(labels, assign(flat, centroids, implementation="triton"))
        assert torch.equal(updated, update(points, labels, centroids, implementation="triton")[0])


def check_ties(dtype: str) -> None:
    """Whole numbers, so that sums are exact; equals inside one step of centroids and in different ones."""
    torch.manual_seed(0)
    points = torch.randint(-3, 4, (1, 100, 64)).to(DTYPES[dtype])
    centroids = torch.randint(-3, 4, (1, 200, 64)).float()
    centroids[:, [20, 90, 199]] = centroids[:, 10:11].clone()
    points[:, :9] = centroids[:, 10:11]
    labels = assign(points, centroids, implementation="triton")
    assert torch.equal(labels, assign(points, centroids, implementation="reference"))
    assert (labels[:, :9] == 10).all()
    assert (assign(points, centroids[:, :1].repeat(1, 150, 1), implementation="triton") == 0).all()


def check_empty_clusters(dtype: str) -> None:
    torch.manual_seed(0)
    points, centroids = torch.randn(2, 90, 32).to(DTYPES[dtype]), torch.randn(2, 5, 32)
    labels = torch.full((2, 90), 2, dtype=torch.int32)
    labels[1] = 4
    updated, counts = update(points, labels, centroids, implementation="triton")
    assert counts.tolist() == [[0, 0, 90, 0, 0], [0, 0, 0, 0, 90]]
    assert torch.allclose(updated[0, 2], points[0].float().mean(0), atol=1e-6)
    assert torch.allclose(updated[1, 4], points[1].float().mean(0), atol=1e-6)
    assert torch.equal(updated[0, [0, 1, 3, 4]], centroids[0, [0, 1, 3, 4]])
    assert torch.equal(updated[1, :4], centroids[1, :4])


def check_not_a_number(dtype: str) -> None:
    torch.manual_seed(0)
    points, centroids = torch.randn(2, 150, 64).to(DTYPES[dtype]), torch.randn(2, 70, 64)
    clean = assign(points, centroids, implementation="triton")
    points[0, 5], points[0, 9, 1] = float("nan"), float("-inf")
    centroids[1, 3] = float("nan")
    result = lloyd(points, centroids, 2, implementation="triton")
    assert result.labels.min() >= 0
    assert result.labels.max() < 70
    labels = assign(points, centroids, implementation="triton")
    untouched = torch.ones(150, dtype=torch.bool)
    untouched[[5, 9]] = False
    assert torch.equal(labels[0, untouched], clean[0, untouched])
    assert torch.equal(labels[1, clean[1] != 3], clean[1, clean[1] != 3]), "a centroid that is NaN attracts nothing"
    assert (labels[1] != 3).all()
    assert (assign(torch.full_like(points, float("nan")), centroids, implementation="triton") < 70).all()


def check_lloyd(dtype: str) -> None:
    """Well separated clouds: no label is a matter of rounding, so both computations take the same course."""
    torch.manual_seed(0)
    centres = torch.randint(-8, 9, (2, 6, 32)).float()
    points = (centres[:, torch.arange(240) % 6] + 0.1 * torch.randn(2, 240, 32)).to(DTYPES[dtype])
    start = points[:, [0, 1, 2, 3, 4, 10]].float()
    results: list[KMeansResult] = [lloyd(points, start, 4, implementation=name) for name in ("triton", "reference")]
    found, expected = results
    assert torch.allclose(found.centroids, expected.centroids, atol=1e-4)
    for index in (1, 2, 3):
        assert torch.equal(found[index], expected[index])


# (head_dim, points, clusters)
SHAPES = [
    # Several blocks of points with a rest, in which some clusters have none.
    (64, 260, 40),
    # The widest head, and a step of centroids with one of them.
    (256, 40, 65),
    # One of each.
    (16, 1, 1),
    # A padded head, and several steps of centroids with a rest.
    (20, 65, 97),
]
# The dtype changes what is loaded, not how points and clusters are cut: a padded head with rests, and one of each.
SHAPES_OF = {"float32": SHAPES, "float16": [(72, 129, 5), (16, 1, 1)]}
CASES: dict[str, Callable[[], None]] = {
    **{
        f"{dtype} {shape}": partial(check_shape, dtype, *shape)
        for dtype, shapes in SHAPES_OF.items()
        for shape in shapes
    },
    "again": partial(check_shape, "float32", 72, 65, 5, again=True),
    **{f"ties {dtype}": partial(check_ties, dtype) for dtype in DTYPES},
    "empty clusters": partial(check_empty_clusters, "float32"),
    "not a number": partial(check_not_a_number, "float32"),
    "lloyd": partial(check_lloyd, "float16"),
}


def run_all() -> dict[str, str]:
    """What went wrong in each case; an empty text when nothing did."""
    outcomes = {}
    for name, case in CASES.items():
        try:
            case()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


@needs_triton
def test_every_case_under_the_interpreter() -> None:
    outcomes: dict[str, str] = json.loads(interpret(Path(__file__)).splitlines()[-1])
    assert list(outcomes) == list(CASES)
    failed = [f"{case}:\n{trace}" for case, trace in outcomes.items() if trace]
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    print(json.dumps(run_all()))
