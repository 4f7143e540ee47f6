"""Video Sparse Attention of MiniMax-H3's sequence (VSA-H3), against its formula in float64: text, images and sound are
dense in both directions, and their tiles are part of the coarse branch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sparse_oracle import random_qkv
from tables import table

from diffusion_runtime.attention import TokenLayout, attention, plan_attention
from diffusion_runtime.attention.recorded_values import call_values, operator_values
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.errors import ConfigError

VSA = "video_sparse_attn"
GRID = (5, 6, 7)


def tiles_of_sequence(
    layout: TokenLayout, tile: tuple[int, int, int], length: int | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of every tile, by their places in the sequence: of the text, then of the grid. length: of valid text."""
    size, before = math.prod(tile), layout.num_prefix_tokens
    text = [*range(before), *range(before + math.prod(layout.grid), layout.num_tokens)]
    valid = len(text) if length is None else length
    of_text, start = [], 0
    for segment in layout.text_segments or ():
        for first in range(start, start + segment, size):
            tokens = [token for token in range(first, min(first + size, start + segment)) if token < valid]
            if tokens:
                of_text.append([text[token] for token in tokens])
        start += segment
    of_grid: dict[tuple[int, int, int], list[int]] = {}
    for token in range(math.prod(layout.grid)):
        place = (token // (layout.grid[1] * layout.grid[2]), token // layout.grid[2] % layout.grid[1])
        t, y, x = *place, token % layout.grid[2]
        of_grid.setdefault((t // tile[0], y // tile[1], x // tile[2]), []).append(before + token)
    return of_text, [of_grid[key] for key in sorted(of_grid)]


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    layout: TokenLayout,
    tile: tuple[int, int, int],
    num_kept: int,
) -> torch.Tensor:
    """The published formula, one sample and one head after the other; 0 for padding."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    repeats = q.shape[2] // k.shape[2]
    for sample in range(q.shape[0]):
        length = None if layout.valid_lengths is None else layout.valid_lengths[sample]
        of_text, of_grid = tiles_of_sequence(layout, tile, length)
        tiles = [*of_text, *of_grid]
        for head in range(q.shape[2]):
            queries, keys, values = (
                x[sample, :, number].double() for x, number in ((q, head), (k, head // repeats), (v, head // repeats))
            )
            means = [torch.stack([x[tokens].mean(0) for tokens in tiles]) for x in (queries, keys, values)]
            scores = means[0] @ means[1].T / q.shape[3] ** 0.5
            pooled = scores.softmax(-1) @ means[2]
            every = [token for tokens in tiles for token in tokens]
            for number, tokens in enumerate(tiles):
                seen = every
                if number >= len(of_text):
                    best = scores[number, len(of_text) :].topk(num_kept).indices.tolist()
                    seen = [each for kept in (*of_text, *(of_grid[one] for one in best)) for each in kept]
                attended = (queries[tokens] @ keys[seen].T / q.shape[3] ** 0.5).softmax(-1) @ values[seen]
                out[sample, tokens, head] = attended + gate[sample, tokens, head].double() * pooled[number]
    return out


H3 = TokenLayout(GRID, num_suffix_tokens=6 + 75 + 9, text_segments=(6, 75, 9))


@table(
    ("layout", "tile", "sparsity", "num_kept"),
    [
        (H3, (4, 4, 4), 0.6, 4),
        # Dense: the gated branch stays.
        (H3, (4, 4, 4), 0.0, 8),
        (H3, (4, 4, 8), 0.9, 1),
        # The second prompt ends in the first of its tiles, the third before it.
        (TokenLayout(GRID, 0, 150, (150, 90, 70), text_segments=(0, 70, 80)), (4, 4, 4), 0.6, 4),
        (TokenLayout(GRID, 20, 70, text_segments=(20, 70)), (4, 4, 4), 0.6, 4),
        (TokenLayout(GRID, 0, 140, (3, 140), (4, 4, 4), (130, 10)), (4, 4, 4), 0.6, 4),
    ],
)
def test_results_equal_the_formula(
    layout: TokenLayout, tile: tuple[int, int, int], sparsity: float, num_kept: int
) -> None:
    batch = 1 if layout.valid_lengths is None else len(layout.valid_lengths)
    q, k, v = random_qkv(layout, batch=batch, num_heads=4, num_kv_heads=2)
    gate = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    options: dict[str, Any] = {"sparsity": sparsity, "tile_size": tile}
    out = attention(q, k, v, backend=VSA, options=options, layout=layout, gate=gate)
    order = torch.arange(layout.num_tokens)
    if layout.tile != (1, 1, 1):
        # The tokens come in tiles; the formula has them in raster order.
        _, of_grid = tiles_of_sequence(layout, tile, None)
        order[: math.prod(GRID)] = torch.tensor([token for tokens in of_grid for token in tokens]).argsort()
    in_raster = [x[:, order] for x in (q, k, v, gate)]
    found = expected(*in_raster, layout, tile, num_kept)  # type: ignore[arg-type]
    torch.testing.assert_close(out[:, order].double(), found, atol=3e-6, rtol=3e-6)
    plan = plan_attention(q, k, backend=VSA, options=options, layout=layout)
    assert plan.is_dense == (sparsity == 0.0)


def test_padding_may_hold_anything() -> None:
    layout = TokenLayout(GRID, 0, 150, (150, 90), text_segments=(70, 80))
    q, k, v = random_qkv(layout, batch=2)
    gate = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    found = attention(q, k, v, backend=VSA, options={"sparsity": 0.6}, layout=layout, gate=gate)
    for each in (q, k, v):
        each[1, 300:] = torch.nan
    gate[1, 300:] = 1e30
    again = attention(q, k, v, backend=VSA, options={"sparsity": 0.6}, layout=layout, gate=gate)
    assert torch.equal(again, found)
    assert not again[1, 300:].any()


def test_without_a_gate_text_has_no_tiles() -> None:
    q, k, v = random_qkv(H3)
    plain = TokenLayout(GRID, num_suffix_tokens=90)
    options = {"sparsity": 0.6}
    results = [attention(q, k, v, backend=VSA, options=options, layout=layout) for layout in (H3, plain)]
    assert torch.equal(*results)


@table("segments", [(6, 75), (6, 75, 10), (-1, 91), (30, 60)])
def test_segments_make_up_the_text(segments: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="text_segments must be lengths"):
        TokenLayout(GRID, 20, 70, text_segments=segments)


def test_an_operator_of_torch_compile_knows_segments() -> None:
    for layout in (H3, TokenLayout(GRID, 0, 9, (3, 9), text_segments=(2, 7)), TokenLayout(GRID)):
        written = operator_values(layout, LayerInfo(0, 1), StepInfo(0, 1), None)
        assert call_values(*written).layout == layout
