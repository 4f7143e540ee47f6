"""Block means against a loop over the definition, for shared and per-head geometries."""

from __future__ import annotations

import itertools

import pytest
import torch

from diffusion_runtime.attention import TokenLayout
from diffusion_runtime.attention.sparse.tiles import tile_geometry
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels import block_means as reference
from diffusion_runtime.kernels.block_means import block_means


def loop(x: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """Mean of each block, token by token, in float64; 0 for an empty one."""
    batch, _, num_heads, head_dim = x.shape
    means = torch.zeros(batch, num_heads, geometry.num_blocks, head_dim, dtype=torch.float64)
    for sample in range(batch):
        for head in range(num_heads):
            row = 0 if geometry.num_groups == 1 else sample * num_heads + head
            offsets = geometry.offsets[row].tolist()
            for block, (start, stop) in enumerate(itertools.pairwise(offsets)):
                for token in geometry.order[row, start:stop].tolist():
                    means[sample, head, block] += x[sample, token, head].double() / (stop - start)
    return means


def per_head_geometry(num_groups: int, num_grid: int, num_text: int) -> BlockGeometry:
    """Another order and other sizes in every row, with empty blocks first, in the middle and last."""
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(num_grid, generator=generator) for _ in range(num_groups)])
    text = torch.arange(num_grid, num_grid + num_text).expand(num_groups, -1)
    cuts = torch.randint(0, num_grid + 1, (num_groups, 2), generator=generator).sort(dim=1).values
    ends = torch.full((num_groups, 1), num_grid)
    offsets = torch.cat([torch.zeros_like(ends), torch.zeros_like(ends), cuts, cuts[:, 1:], ends, ends], dim=1)
    return BlockGeometry(torch.cat([orders, text], dim=1).int(), offsets.int(), num_grid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", [TokenLayout((5, 6, 7)), TokenLayout((1, 3, 2), 2, 3)], ids=["ragged", "text"])
def test_tiles(layout: TokenLayout, dtype: torch.dtype) -> None:
    geometry = tile_geometry(layout, (4, 4, 4), "cpu")
    x = torch.randn(2, layout.num_tokens, 3, 5).to(dtype)
    means = block_means(x, geometry)
    assert means.dtype == torch.float32
    assert means.shape == (2, 3, geometry.num_blocks, 5)
    torch.testing.assert_close(means.double(), loop(x, geometry), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_heads_at_a_time", [1, 2, 3])
def test_every_head_with_its_own_blocks(num_heads_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_CHUNK", 44 * 5 * num_heads_at_a_time)
    geometry = per_head_geometry(6, 40, 4)
    x = torch.randn(2, 44, 3, 5)
    means = block_means(x, geometry)
    assert (geometry.sizes == 0).sum() >= 18
    torch.testing.assert_close(means.double(), loop(x, geometry), atol=1e-6, rtol=1e-6)


def test_text_and_other_blocks_never_reach_a_mean() -> None:
    geometry = tile_geometry(TokenLayout((2, 4, 8), 3, 2), (4, 4, 4), "cpu")
    x = torch.randn(1, 69, 2, 4)
    expected = block_means(x, geometry)
    x[:, :3], x[:, 67:] = float("nan"), float("inf")
    assert torch.equal(block_means(x, geometry), expected)
    x[0, 3] = float("nan")
    assert not block_means(x, geometry)[:, :, 0].isfinite().any()
    assert torch.equal(block_means(x, geometry)[:, :, 1:], expected[:, :, 1:])


def test_a_strided_input_and_a_small_share_of_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = tile_geometry(TokenLayout((4, 5, 6)), (4, 4, 4), "cpu")
    x = torch.randn(2, 120, 3, 5, 8)[:, :, 1].transpose(2, 3)
    whole = block_means(x, geometry)
    monkeypatch.setattr(reference, "_CHUNK", 120 * 5 * 2)
    assert torch.equal(block_means(x, geometry), whole)
    assert torch.equal(block_means(x.contiguous(), geometry), whole)


def test_many_equal_tokens_keep_their_mean() -> None:
    geometry = tile_geometry(TokenLayout((1, 64, 1024)), (1, 64, 1024), "cpu")
    x = torch.full((1, 65536, 1, 1), 0.1, dtype=torch.bfloat16)
    torch.testing.assert_close(block_means(x, geometry).flatten(), x.flatten()[:1].float(), atol=0, rtol=1e-3)


@pytest.mark.parametrize("shape", [(1, 119, 2, 4), (1, 121, 2, 4)])
def test_another_number_of_tokens_is_refused(shape: tuple[int, ...]) -> None:
    geometry = tile_geometry(TokenLayout((4, 5, 6)), (4, 4, 4), "cpu")
    with pytest.raises(ConfigError, match=r"block means: expected \[batch, 120, heads, head_dim\]"):
        block_means(torch.zeros(shape), geometry)


def test_another_number_of_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch \* heads 6, got \(1, 44, 3, 5\)"):
        block_means(torch.zeros(1, 44, 3, 5), per_head_geometry(6, 40, 4))
