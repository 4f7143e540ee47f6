"""Sol-Attn (arXiv:2607.24027): training-free, by tiles whose mean key scores high; the others count as one key each.

A tile of queries and one of keys are scored by the product of their means. Keys are taken from the mean of all keys,
which moves every score of a query alike, so that one threshold serves all: a pair is computed exactly where its score
exceeds `tau` standard deviations of the scores that its query would have if the channels of the keys' means varied
independently. Or each tile of queries keeps a fixed share, the best. Its own tile and those before and after it are
always exact, and so are the rows and columns of what stands around the grid: text, sound, references.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.sparse.interface import ScheduledOptions, SparseBackend, check_grid, plan_of_call
from diffusion_runtime.attention.sparse.tile_means import (
    TileMeans,
    num_kept_tiles,
    plan_of_lists,
    read_tiles,
    tile_means,
)
from diffusion_runtime.attention.sparse.tiles import tile_counts, tiles_of
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.kernels.block_packing import Averaged
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.row_masks import listed_blocks
from diffusion_runtime.kernels.highest_blocks import highest

# Scores of tiles that are held in float32 at a time.
_CHUNK = 1 << 25


@dataclass(frozen=True)
class SolOptions(ScheduledOptions):
    """tau: pairs of tiles are exact whose score lies above so many standard deviations; where scores are normal 1 keeps
    about 0.16 of them, 1.5 keeps 0.07 and 2 keeps 0.03. top_k: in place of tau, the share of the key tiles in (0, 1]
    that each tile of queries keeps, rounded up, its own and its neighbours among them. tile_size: tokens of a tile
    (frames, height, width); by default 64, as 4 x 4 x 4, flatter in grids of fewer frames. tail: `none` leaves out
    what is not exact."""

    tail: Literal["none", "pooled"] = field(default="pooled", kw_only=True)
    tau: float = 1.3
    top_k: float | None = None
    tile_size: Extent | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.tau):
            raise ValueError(f"tau: expected a number, got {self.tau}")
        if self.top_k is not None and not 0.0 < self.top_k <= 1.0:
            raise ValueError(f"top_k: expected a share of the key tiles in (0, 1], got {self.top_k}")
        if self.tile_size is not None and min(self.tile_size) < 1:
            raise ValueError(f"tile_size: expected three whole numbers of 1 or more, got {list(self.tile_size)}")


@register_backend
class SolBackend(SparseBackend):
    """Tiles by their scores, over a threshold or the best."""

    name = "sol_attn"
    aliases = ("sol",)
    summary = "Sol-Attn: tiles of high score exactly, every other as one key"
    options_type = SolOptions
    # Scores of random numbers lie close together, so the tail is what a small test would see of it.
    self_test_options = MappingProxyType({"tau": 0.5, "tile_size": (2, 2, 2)})

    def keeps_everything(self, options: SolOptions, layout: TokenLayout, layer: LayerInfo) -> str | None:  # noqa: ARG002
        num_tiles = _num_tiles(options, layout.grid)
        if num_tiles <= 2:
            return "the grid has no more than two tiles"
        if options.top_k is not None and _num_kept(options.top_k, num_tiles) == num_tiles:
            return "top_k keeps every tile"
        return None

    def tile_of(self, options: SolOptions, grid: Extent) -> Extent:
        return _tile(options, grid)

    def sparse_density(self, options: SolOptions, layout: TokenLayout, layer: LayerInfo) -> float | None:  # noqa: ARG002
        if options.top_k is None:
            return None
        num_tiles = _num_tiles(options, layout.grid)
        return _num_kept(options.top_k, num_tiles) / num_tiles

    def averaged(self, call: AttentionCall) -> Averaged:
        return "qk" if call.options.tail == "none" else "qkv"

    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        geometry = tiles_of(call, _tile(call.options, call.grid_layout.grid))
        return self._select(call, tile_means(call.q, call.k, None, geometry))

    def run(self, call: AttentionCall) -> AttentionResult:
        layout = check_grid(self.name, call)
        reason = self.dense_reason(call)
        if reason is not None:
            return self.run_dense(call, reason)
        geometry = tiles_of(call, _tile(call.options, layout.grid))
        means, packed = read_tiles(call, geometry, self.averaged(call))
        return self.run_sparse(call, self._select(call, means), packed=packed, means=means.of_keys)

    def _select(self, call: AttentionCall, means: TileMeans) -> SparsePlan:
        options: SolOptions = call.options
        geometry = tiles_of(call, _tile(options, call.grid_layout.grid))
        batch, num_heads, num_tiles, _ = means.q.shape
        device = call.q.device
        if options.top_k is not None:
            num_kept = _num_kept(options.top_k, num_tiles)
            best = torch.empty(batch * num_heads, num_tiles, num_kept, dtype=torch.int32, device=device)
            for rows, scores, near in _scores(means, call.softmax_scale):
                # Its own tile before its neighbours, where a share has no room for them.
                scores.masked_fill_(near, torch.finfo(scores.dtype).max)
                scores.diagonal(dim1=-2, dim2=-1).fill_(float("inf"))
                best[rows] = highest(scores, num_kept)
            return plan_of_lists(self.name, call, geometry, best, is_dense=False)
        above = _thresholds(means, geometry.sizes, options.tau * abs(call.softmax_scale))
        centred = TileMeans(means.q, means.k - _mean_of_all(means.k, geometry.sizes), None)
        kv_count = torch.empty(batch * num_heads, num_tiles, dtype=torch.int32, device=device)
        kv_index = torch.empty(*kv_count.shape, num_tiles, dtype=torch.int32, device=device)
        for rows, scores, near in _scores(centred, call.softmax_scale):
            kv_count[rows], kv_index[rows] = listed_blocks((scores > above[rows]) | near)
        return plan_of_call(
            self.name,
            call,
            q=geometry,
            kv=geometry,
            group_of=torch.arange(batch * num_heads, dtype=torch.int32, device=device).view(batch, num_heads),
            kv_count=kv_count,
            kv_index=kv_index,
        )


def _tile(options: SolOptions, grid: Extent) -> Extent:
    """Return the tokens of a tile. Tiles in space and time lose less than flat ones of as many tokens, which a grid of
    few frames would cut off."""
    if options.tile_size is not None:
        return options.tile_size
    return (1, 8, 8) if grid[0] == 1 else (2, 4, 8) if grid[0] < 4 else (4, 4, 4)


def _num_tiles(options: SolOptions, grid: Extent) -> int:
    return math.prod(tile_counts(grid, _tile(options, grid)))


def _num_kept(top_k: float, num_tiles: int) -> int:
    return num_kept_tiles(1.0 - top_k, num_tiles)


def _mean_of_all(k: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """[B, kv_heads, 1, D]: the mean over the grid's tokens. k: [B, kv_heads, N, D], of the tiles; sizes: int32 [1,
    N]."""
    shares = sizes[0] / sizes.sum()
    return (k * shares[:, None]).sum(dim=2, keepdim=True)


def _thresholds(means: TileMeans, sizes: torch.Tensor, deviations: float) -> torch.Tensor:
    """[B * H, N, 1]: so many standard deviations of each query tile's scores before the scale."""
    variance = _mean_of_all((means.k - _mean_of_all(means.k, sizes)).square(), sizes)
    variance = variance.repeat_interleave(means.q.shape[1] // means.k.shape[1], dim=1)
    of_scores = (means.q.square() * variance).sum(dim=-1, keepdim=True)
    return deviations * of_scores.sqrt().flatten(0, 1)


def _scores(means: TileMeans, scale: float) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield the scaled scores [n, N, N] of some rows of [B * H] heads, the rows, and bool [N, N], the pairs of
    neighbours."""
    num_kv_heads, num_tiles = means.k.shape[1:3]
    repeats = means.q.shape[1] // num_kv_heads
    # Query heads that share a key head lie next to each other, and so do the samples' key heads.
    q, k = means.q.reshape(-1, repeats * num_tiles, means.q.shape[3]), means.k.flatten(0, 1)
    places = torch.arange(num_tiles, device=q.device)
    near = (places[:, None] - places).abs() <= 1
    step = max(1, _CHUNK // (num_tiles * num_tiles * repeats))
    for start in range(0, len(k), step):
        part = slice(start, min(start + step, len(k)))
        scores = scale * q[part] @ k[part].transpose(1, 2)
        yield slice(part.start * repeats, part.stop * repeats), scores.view(-1, num_tiles, num_tiles), near
