"""Which key clusters a cluster of queries keeps, against the rule in words."""

from __future__ import annotations

import itertools
import math

import torch
from tables import table

from diffusion_runtime.attention.sparse.sparse_video_gen_2 import keep_most_mass


def kept_sets(scores: torch.Tensor, sizes: torch.Tensor, top_p: float, minimum: int = 0) -> list[list[set[int]]]:
    count, index = keep_most_mass(scores, sizes, top_p, minimum)
    assert count.dtype == index.dtype == torch.int32
    assert index.shape == scores.shape
    assert (index.sort(dim=-1).values == torch.arange(scores.shape[-1])).all(), "every cluster stands somewhere"
    result = []
    for row_count, row_index in zip(count.tolist(), index.tolist(), strict=True):
        for number, listed in zip(row_count, row_index, strict=True):
            assert listed[:number] == sorted(listed[:number])
        result.append([set(listed[:number]) for number, listed in zip(row_count, row_index, strict=True)])
    return result


def by_the_rule(scores: list[float], sizes: list[int], top_p: float, minimum: int) -> tuple[set[int], float]:
    """What is kept, and how near the decision was."""
    top = max(score for score, size in zip(scores, sizes, strict=True) if size)
    mass = [size * math.exp(score - top) for score, size in zip(scores, sizes, strict=True)]
    share = [value / sum(mass) for value in mass]
    kept, before, margin = set(), 0.0, 1.0
    for place, cluster in enumerate(sorted(range(len(share)), key=lambda j: (-share[j], j))):
        margin = min(margin, abs(before - top_p))
        if before <= top_p or place < minimum:
            kept.add(cluster)
        before += share[cluster]
    return kept, margin


@table("top_p", [0.0, 0.3, 0.9, 0.99])
@table("minimum", [0, 3, 17])
def test_the_rule(top_p: float, minimum: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(4, 9, 17, generator=generator)
    sizes = torch.randint(0, 6, (4, 17), generator=generator, dtype=torch.int32)
    assert (sizes == 0).any()
    for row, found in enumerate(kept_sets(scores, sizes, top_p, minimum)):
        for cluster, kept in enumerate(found):
            expected, margin = by_the_rule(scores[row, cluster].tolist(), sizes[row].tolist(), top_p, minimum)
            # Closer than float32 can tell may go either way. At a top_p of 0 the first place is always on the edge.
            assert kept == expected or margin < 1e-6 < top_p


@table("top_p", [0.2, 0.5, 0.9])
def test_the_kept_mass_passes_top_p_and_is_minimal(top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 5, 40, generator=generator)
    sizes = torch.randint(1, 90, (2, 40), generator=generator, dtype=torch.int32)
    share = torch.softmax(scores.double() + sizes.double().log()[:, None], dim=-1)
    for row, found in enumerate(kept_sets(scores, sizes, top_p)):
        for cluster, kept in enumerate(found):
            shares = sorted(share[row, cluster, sorted(kept)].tolist())
            assert sum(shares) > top_p
            assert sum(shares[1:]) <= top_p


def test_more_mass_keeps_more() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(2, 5, 30, generator=generator)
    sizes = torch.randint(0, 9, (2, 30), generator=generator, dtype=torch.int32)
    course = [kept_sets(scores, sizes, top_p) for top_p in (0.0, 0.25, 0.5, 0.75, 0.95)]
    for less, more in itertools.pairwise(course):
        assert all(a <= b for row_a, row_b in zip(less, more, strict=True) for a, b in zip(row_a, row_b, strict=True))
    assert course[0] != course[-1]


def test_a_large_cluster_outweighs_a_small_one_with_the_same_centroid() -> None:
    scores = torch.zeros(1, 1, 2)
    assert kept_sets(scores, torch.tensor([[1, 100]], dtype=torch.int32), 0.9) == [[{1}]]
    assert kept_sets(scores, torch.tensor([[100, 1]], dtype=torch.int32), 0.9) == [[{0}]]
    assert kept_sets(scores, torch.tensor([[50, 50]], dtype=torch.int32), 0.9) == [[{0, 1}]]


def test_equals_go_by_index() -> None:
    assert kept_sets(torch.zeros(1, 1, 4), torch.ones(1, 4, dtype=torch.int32), 0.25) == [[{0, 1}]]
    assert kept_sets(torch.zeros(1, 1, 4), torch.ones(1, 4, dtype=torch.int32), 0.0, 3) == [[{0, 1, 2}]]


@table("empty", [0, 2, 4])
def test_an_empty_cluster_has_no_mass_whatever_its_centroid(empty: int) -> None:
    sizes = torch.ones(1, 5, dtype=torch.int32)
    sizes[0, empty] = 0
    for old in (50.0, float("nan"), float("inf")):
        scores = torch.zeros(1, 1, 5)
        scores[0, 0, empty] = old
        assert kept_sets(scores, sizes, 0.7) == [[set([j for j in range(5) if j != empty][:3])]]


def test_scores_that_are_not_numbers_still_keep_something_that_exists() -> None:
    scores = torch.full((1, 2, 6), float("nan"))
    count, index = keep_most_mass(scores, torch.ones(1, 6, dtype=torch.int32), 0.9, 0)
    assert (count >= 1).all()
    assert ((index >= 0) & (index < 6)).all()


def test_large_scores_do_not_overflow() -> None:
    scores = torch.tensor([[[1e4, 1e4 - 1.0, -1e4]]])
    assert kept_sets(scores, torch.tensor([[1, 1, 1000]], dtype=torch.int32), 0.5) == [[{0}]]
