"""Rotary positions against diffusers' and against the properties that make them positions."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from tables import table

from diffusion_runtime.kernels.qk_norm_rope.reference import rotate
from diffusion_runtime.layers.rope import (
    THETA,
    diagonal_rotations,
    extent_paces,
    followed_by_text,
    grid_extent_rotations,
    grid_rotations,
    position_rotations,
    split_head_dim,
)

CPU = torch.device("cpu")


def test_channels_are_split_over_the_axes() -> None:
    assert split_head_dim(128) == (44, 42, 42)
    assert split_head_dim(64) == (24, 20, 20)
    assert split_head_dim(16) == (8, 4, 4)


@table(("grid", "head_dim"), [((3, 4, 5), 64), ((1, 7, 2), 128), ((21, 1, 3), 16)])
def test_rotations_equal_diffusers(grid: tuple[int, int, int], head_dim: int) -> None:
    cos, sin = WanRotaryPosEmbed(head_dim, (1, 1, 1), 32)(torch.zeros(1, 1, *grid))
    table = grid_rotations(grid, head_dim, CPU)
    assert table.shape == (grid[0] * grid[1] * grid[2], head_dim // 2)
    torch.testing.assert_close(table.real, cos[0, :, 0, 0::2], rtol=0, atol=1e-7)
    torch.testing.assert_close(table.imag, sin[0, :, 0, 1::2], rtol=0, atol=1e-7)


def test_a_plan_of_memory_computes_no_rotations() -> None:
    """Of more tokens than the machine could hold; what a plan counts are their shape and dtype."""
    meta, paces = torch.device("meta"), extent_paces(THETA, 24, 3, is_double=True)
    for side in (3, 10**5):
        axes = [torch.zeros(size) for size in (2, side, side)]
        planned = [
            grid_rotations((2, side, side), 24, meta),
            grid_extent_rotations(axes, (1, 1, 1), paces, 2, 24, meta),
        ]
        assert [tuple(each.shape) for each in planned] == [(2 * side**2, 12), (2 * side**2, 2, 6)]
        if side == 3:
            real = [
                grid_rotations((2, side, side), 24, CPU),
                grid_extent_rotations(axes, (1, 1, 1), paces, 2, 24, CPU),
            ]
            assert [(each.shape, each.dtype) for each in real] == [(each.shape, each.dtype) for each in planned]


@table("dtype", [torch.float32, torch.bfloat16])
def test_rotate_turns_neighbouring_channels(dtype: torch.dtype) -> None:
    table = grid_rotations((2, 3, 2), 16, CPU)
    x = torch.randn(2, 12, 3, 16).to(dtype)
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    cos, sin = table.real[:, None], table.imag[:, None]
    expected = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(dtype)
    out = rotate(x.clone(), table)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)


def test_rotate_works_on_a_part_of_a_wider_tensor() -> None:
    table = grid_rotations((1, 2, 3), 8, CPU)
    wide = torch.randn(1, 6, 3 * 16)
    q = wide[..., 16:32].unflatten(-1, (2, 8))
    expected = rotate(q.clone(), table)
    rest = wide[..., :16].clone()
    torch.testing.assert_close(rotate(q, table), expected)
    assert torch.equal(wide[..., :16], rest)


def test_scores_depend_on_the_distance_alone() -> None:
    table = grid_rotations((4, 4, 4), 64, CPU)
    q, k = torch.randn(1, 1, 1, 64).expand(1, 64, 1, 64), torch.randn(1, 1, 1, 64).expand(1, 64, 1, 64)
    scores = rotate(q.clone(), table)[0, :, 0] @ rotate(k.clone(), table)[0, :, 0].T
    # (1, 1, 1) from (0, 1, 0), and (3, 2, 2) from (2, 2, 1): one frame and one column each.
    torch.testing.assert_close(scores[21, 4], scores[58, 41])
    assert abs(float(scores[21, 4] - scores[21, 21])) > 1e-3


def test_positions_may_begin_below_zero_and_channels_be_given() -> None:
    axes, channels = (range(1), range(-2, 3), range(-1, 1)), (4, 6, 6)
    table = position_rotations(axes, channels, CPU, theta=256.0)
    assert table.shape == (10, 8)
    # Token (0, row -2, column 0) is the second one; pair 1 of the rows' three turns by -2 / 256 ** (2 / 6).
    expected = torch.tensor(-2 / 256 ** (1 / 3))
    torch.testing.assert_close(table[1, 2 + 1].angle(), expected)
    torch.testing.assert_close(table[1, 5:], torch.ones(3, dtype=torch.complex64))


def test_text_on_the_diagonal_and_text_that_is_not_turned() -> None:
    channels = (4, 6, 6)
    grid = position_rotations((range(1), range(2), range(2)), channels, CPU)
    text = diagonal_rotations(range(1, 4), channels, CPU)
    single = position_rotations((range(2, 3),) * 3, channels, CPU)
    torch.testing.assert_close(text[1:2], single)
    assert torch.equal(followed_by_text(grid, text), torch.cat([grid, text]))
    plain = followed_by_text(grid, 3)
    assert plain.shape == (7, 8)
    x = torch.randn(1, 7, 2, 16)
    assert torch.equal(rotate(x.clone(), plain)[:, 4:], x[:, 4:])


def test_every_head_may_turn_by_its_own() -> None:
    tables = [grid_rotations((1, 2, 3), 8, CPU, theta) for theta in (100.0, 7.0)]
    x = torch.randn(2, 6, 2, 8)
    expected = torch.cat([rotate(x[:, :, head : head + 1].clone(), table) for head, table in enumerate(tables)], dim=2)
    assert torch.equal(rotate(x.clone(), torch.stack(tables, dim=1)[None]), expected)
    half = rotate(x.bfloat16(), torch.stack(tables, dim=1)[None])
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=2e-2, atol=2e-2)
