"""Video Sparse Attention of MiniMax-H3's sequence (VSA-H3), against its formula in float64: text, images and sound are
dense in both directions, and their tiles are part of the coarse branch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sparse_oracle import random_qkv
from tables import table
from vsa_h3_oracle import tiles_of_sequence, vsa_h3_attention

from diffusion_runtime.attention import TokenLayout, attention, plan_attention
from diffusion_runtime.attention.recorded_values import call_values, operator_values
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.errors import ConfigError

VSA = "video_sparse_attn"
GRID = (5, 6, 7)


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
    found = vsa_h3_attention(*in_raster, layout, tile, num_kept)  # type: ignore[arg-type]
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
