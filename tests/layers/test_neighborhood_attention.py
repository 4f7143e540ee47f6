"""Neighbourhood attention in boxes against one mask over the whole grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tables import table

from diffusion_runtime.layers.neighborhood_attention import neighborhood_attention

Size = tuple[int, int, int]


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Size) -> torch.Tensor:
    """Each token and its window, moved inward at the edges, in one mask."""
    grid = q.shape[1:4]
    places = torch.cartesian_prod(*(torch.arange(length) for length in grid))
    seen = torch.ones(len(places), len(places), dtype=torch.bool)
    for axis, length in enumerate(grid):
        size = min(window[axis], length)
        first = (places[:, axis] - size // 2).clamp(0, length - size)[:, None]
        seen &= (places[:, axis] >= first) & (places[:, axis] < first + size)
    heads = (x.flatten(1, 3).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=0.3).transpose(1, 2).unflatten(1, grid)


@table(
    "grid, window, box",
    [
        ((5, 9, 11), (3, 5, 3), (2, 4, 4)),
        ((4, 8, 8), (3, 3, 3), (4, 8, 8)),
        ((7, 5, 6), (4, 2, 3), (3, 2, 5)),
        ((3, 6, 13), (5, 7, 7), (2, 2, 4)),
        ((1, 4, 4), (1, 1, 1), (4, 3, 3)),
    ],
)
def test_boxes_equal_one_mask_of_the_grid(grid: Size, window: Size, box: Size) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, *grid, 2, 8, generator=generator) for _ in range(3))
    found = neighborhood_attention(q, k, v, window, scale=0.3, box=box)
    assert (found - whole(q, k, v, window)).abs().max() < 1e-5


def test_a_part_of_the_queries_sees_what_it_sees_within_the_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 9, 7, 2, 8, generator=generator) for _ in range(3))
    found = neighborhood_attention(q[:, 2:5, 4:], k, v, (3, 5, 3), scale=0.3, origin=(2, 4, 0), box=(2, 2, 4))
    assert (found - whole(q, k, v, (3, 5, 3))[:, 2:5, 4:]).abs().max() < 1e-5
