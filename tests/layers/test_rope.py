"""Rotary positions against diffusers' and against the properties that make them positions."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from diffusion_runtime.layers.rope import grid_rotations, rotate, split_head_dim

CPU = torch.device("cpu")


def test_channels_are_split_over_the_axes() -> None:
    assert split_head_dim(128) == (44, 42, 42)
    assert split_head_dim(64) == (24, 20, 20)
    assert split_head_dim(16) == (8, 4, 4)


@pytest.mark.parametrize(("grid", "head_dim"), [((3, 4, 5), 64), ((1, 7, 2), 128), ((21, 1, 3), 16)])
def test_rotations_equal_diffusers(grid: tuple[int, int, int], head_dim: int) -> None:
    cos, sin = WanRotaryPosEmbed(head_dim, (1, 1, 1), 32)(torch.zeros(1, 1, *grid))
    table = grid_rotations(grid, head_dim, CPU)
    assert table.shape == (grid[0] * grid[1] * grid[2], head_dim // 2)
    torch.testing.assert_close(table.real, cos[0, :, 0, 0::2], rtol=0, atol=1e-7)
    torch.testing.assert_close(table.imag, sin[0, :, 0, 1::2], rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_the_table_can_be_used_in_and_out_of_inference_mode() -> None:
    grid_rotations.cache_clear()
    with torch.inference_mode():
        table = grid_rotations((2, 2, 2), 8, CPU)
    assert not table.is_inference()
    assert grid_rotations((2, 2, 2), 8, CPU) is table
