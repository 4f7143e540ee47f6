"""Video Sparse Attention (Zhang et al., arXiv:2505.13389).

The grid is cut into tiles. Attention among the tiles' means selects which key tiles each query tile keeps (the fine
branch attends to their tokens exactly), and is added to the result itself, weighted by a gate that the model learned.

VSA-H3, of MiniMax-H3's sequence: the text around the grid is dense in both directions, and with a gate its tiles
(text_tiles.py) take part in the coarse attention, those of the grid's among each other in the selection alone.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, CallForm
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.sparse.interface import (
    ScheduledOptions,
    SparseBackend,
    check_grid,
    sparse_capability,
)
from diffusion_runtime.attention.sparse.text_tiles import TextTiles, text_tiles_of
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
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_packing import Averaged
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, SparsePlan, add_branch
from diffusion_runtime.kernels.highest_blocks import highest

TILE_SIZES = ((4, 4, 4), (4, 4, 8), (4, 8, 8))

# At the end of an implementation's name.
_GATED = ", with the gated branch"

_logger = logging.getLogger("diffusion_runtime.attention")


@dataclass(frozen=True)
class VideoSparseOptions(ScheduledOptions):
    """sparsity: the share of key tiles that a query tile drops, in [0, 1]; at least one is kept. VSA_sparsity: another
    spelling of it. tile_size: tokens of a tile (frames, height, width), one of TILE_SIZES.
    """

    sparsity: float = 0.0
    VSA_sparsity: float | None = None
    tile_size: Extent = (4, 4, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.VSA_sparsity is not None:
            if self.sparsity not in (0.0, self.VSA_sparsity):
                raise ValueError(
                    f"sparsity {self.sparsity} and VSA_sparsity {self.VSA_sparsity} are two spellings of one option; "
                    "give one"
                )
            object.__setattr__(self, "sparsity", self.VSA_sparsity)
        if not 0.0 <= self.sparsity <= 1.0:
            spelling = "sparsity" if self.VSA_sparsity is None else "VSA_sparsity"
            raise ValueError(f"{spelling} must lie in [0, 1], got {self.sparsity}")
        if self.tile_size not in TILE_SIZES:
            allowed = ", ".join(str(list(size)) for size in TILE_SIZES)
            raise ValueError(f"tile_size must be one of {allowed}, got {list(self.tile_size)}")


@register_backend
class VideoSparseBackend(SparseBackend):
    """out = fine + gate * coarse.

    Dense, by schedule or by size, means a sparsity of 0: the fine branch attends to everything. The gated coarse branch
    is a part of the model that learned it and stays, so that a model trained under rising sparsity sees what it saw at
    the start of it. For plain attention instead, let a schedule rule choose a dense backend, which takes no gate.

    The log-sum-exp is that of the fine branch: with a gate the result is no softmax.
    """

    name = "video_sparse_attn"
    aliases = ("vsa",)
    summary = "Video Sparse Attention: the best tiles of a coarse attention, plus that attention times a learned gate"
    capability = sparse_capability(SparseBackend.capability.features | {"gate"})
    options_type = VideoSparseOptions
    self_test_options = MappingProxyType({"sparsity": 0.6})

    def keeps_everything(self, options: VideoSparseOptions, layout: TokenLayout, layer: LayerInfo) -> str | None:  # noqa: ARG002
        num_tiles = math.prod(tile_counts(layout.grid, options.tile_size))
        if num_kept_tiles(options.sparsity, num_tiles) == num_tiles:
            return "the sparsity drops no tile"
        return None

    def tile_of(self, options: VideoSparseOptions, grid: Extent) -> Extent:  # noqa: ARG002
        return options.tile_size

    def sparse_density(self, options: VideoSparseOptions, layout: TokenLayout, layer: LayerInfo) -> float:  # noqa: ARG002
        num_tiles = math.prod(tile_counts(layout.grid, options.tile_size))
        return num_kept_tiles(options.sparsity, num_tiles) / num_tiles

    def expected_dense(self, form: CallForm, reason: str) -> str | None:
        expected = super().expected_dense(form, reason)
        return expected if expected is None or not form.has_gate else expected + _GATED

    def expected_warning(self, form: CallForm) -> str | None:
        has_grid = form.layout is not None and form.layout.num_grid_tokens > 0
        if form.has_gate or not has_grid or self.dense_reason(form) is not None:
            return None
        return self._without_gate(form.options)

    def _without_gate(self, options: VideoSparseOptions) -> str:
        return (
            f"{self.name}: this checkpoint brings no trained gate, so it was not trained for a sparsity of "
            f"{options.sparsity:g} and the result loses detail; lower the sparsity, or use a checkpoint trained with "
            "Video Sparse Attention"
        )

    def averaged(self, call: AttentionCall) -> Averaged:
        return "qk" if call.gate is None and call.options.tail == "none" else "qkv"

    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        geometry = tiles_of(call, call.options.tile_size)
        return self.select_tiles(call, tile_means(call.q, call.k, None, geometry), None)[0]

    def run(self, call: AttentionCall) -> AttentionResult:
        check_grid(self.name, call)
        if call.gate is not None and call.gate.shape != call.q.shape:
            raise ConfigError(
                f"{self.name}: expected a gate like q {tuple(call.q.shape)}, got {tuple(call.gate.shape)}"
            )
        reason = self.dense_reason(call)
        if reason is not None:
            result = self.run_dense(call, reason)
            return result if call.gate is None else self._add_coarse(result, call, call.gate)
        if call.gate is None and call.state.is_first(f"{self.name}: no gate"):
            _logger.warning("%s", self._without_gate(call.options))
        means, packed = read_tiles(call, tiles_of(call, call.options.tile_size), self.averaged(call))
        text = _text_means(call)
        # Without a gate nothing reads the coarse attention's values.
        of_coarse = means if call.gate is not None else replace(means, v=None)
        plan, coarse = self.select_tiles(call, of_coarse, text)
        branch = None if coarse.pooled is None or call.gate is None else PooledBranch(coarse.pooled, call.gate)
        return _with_text(self.run_sparse(call, plan, branch, packed, means.of_keys), call, text, coarse)

    def _add_coarse(self, result: AttentionResult, call: AttentionCall, gate: torch.Tensor) -> AttentionResult:
        """A dense result with the gated branch on top."""
        geometry = tiles_of(call, call.options.tile_size)
        means = tile_means(call.q, call.k, call.v, geometry)
        text = _text_means(call)
        coarse = attend_tiles(means, scale=call.softmax_scale, num_kept=None, text=text)
        assert coarse.pooled is not None
        every = torch.arange(geometry.num_blocks, dtype=torch.int32, device=call.q.device)
        plan = plan_of_lists(self.name, call, geometry, every.expand(1, geometry.num_blocks, -1), is_dense=True)
        out = add_branch(result.out, plan, PooledBranch(coarse.pooled, gate))
        gated = AttentionResult(out, result.lse, f"{result.implementation}{_GATED}")
        return _with_text(gated, call, text, coarse)

    def select_tiles(
        self, call: AttentionCall, means: TileMeans, text: TextMeans | None
    ) -> tuple[SparsePlan, CoarseResult]:
        """The plan, and with means of values what the coarse branch gives each tile."""
        num_kept = num_kept_tiles(call.options.sparsity, means.q.shape[2])
        coarse = attend_tiles(means, scale=call.softmax_scale, num_kept=num_kept, text=text)
        assert coarse.kept is not None
        geometry = tiles_of(call, call.options.tile_size)
        return plan_of_lists(self.name, call, geometry, coarse.kept.flatten(0, 1), is_dense=False), coarse


def _text_means(call: AttentionCall) -> TextMeans | None:
    """The means of the text's tiles, of a call with a gate whose layout has any."""
    tiles = text_tiles_of(call, math.prod(call.options.tile_size)) if call.gate is not None else None
    if tiles is None:
        return None
    q, k, v = (tiles.means(x, call.grid_layout) for x in (call.q, call.k, call.v))
    return TextMeans(TileMeans(q, k, v), tiles)


def _with_text(
    result: AttentionResult, call: AttentionCall, text: TextMeans | None, coarse: CoarseResult
) -> AttentionResult:
    """A result whose text has the gated branch as well."""
    if text is not None and coarse.pooled_text is not None and call.gate is not None:
        text.tiles.add_(result.out, coarse.pooled_text, call.gate, call.grid_layout)
    return result


# Scores of tiles that are held in float32 at a time.
_CHUNK = 1 << 25


@dataclass(frozen=True)
class CoarseResult:
    """B batch, H query heads, N tiles.

    kept: int32 [B, H, N, num_kept], the key tiles of each query tile, ascending; None when none were asked for.
    pooled: float32 [B, H, N, head_dim], what attention among tiles gives each; None without values. pooled_text: the
    same of the text's tiles; None where they take no part.
    """

    kept: torch.Tensor | None
    pooled: torch.Tensor | None
    pooled_text: torch.Tensor | None = None


@dataclass(frozen=True)
class TextMeans:
    """The means of the text's tiles, with values, and the tiles."""

    means: TileMeans
    tiles: TextTiles


def attend_tiles(
    means: TileMeans, *, scale: float, num_kept: int | None, text: TextMeans | None = None
) -> CoarseResult:
    """Attention among tiles' means in float32; scores are not weighted by how many tokens a tile holds.

    num_kept: key tiles of the grid to keep for each of its query tiles; None for the pooled values alone. text: tiles
    of the text, which take part in the pooled values.
    """
    q_means, k_means, v_means = means.q, means.k, means.v
    batch, num_heads, num_tiles, head_dim = q_means.shape
    repeats = num_heads // k_means.shape[1]
    kept = None
    if num_kept is not None:
        kept = torch.empty(batch, num_heads, num_tiles, num_kept, dtype=torch.int32, device=q_means.device)
    pooled = None if v_means is None else torch.empty_like(q_means)
    step = max(1, _CHUNK // (num_tiles * num_tiles * repeats))
    for sample in range(batch):
        for start in range(0, k_means.shape[1], step):
            kv_heads = slice(start, min(start + step, k_means.shape[1]))
            heads = slice(kv_heads.start * repeats, kv_heads.stop * repeats)
            # Query heads that share a key head are stacked, so that keys are not repeated.
            stacked = q_means[sample, heads].reshape(-1, repeats * num_tiles, head_dim)
            scores = scale * stacked @ k_means[sample, kv_heads].transpose(1, 2)
            if kept is not None and num_kept is not None:
                kept[sample, heads] = highest(scores, num_kept).view(-1, num_tiles, num_kept)
            if pooled is not None and v_means is not None:
                values = v_means[sample, kv_heads]
                if text is not None:
                    of_text = scale * stacked @ text.means.k[sample, kv_heads].transpose(1, 2)
                    scores = torch.cat([scores, _without_padding(of_text, text.tiles, sample)], dim=-1)
                    values = _joined(values, text.means.v, sample, kv_heads)
                pooled[sample, heads] = (scores.softmax(dim=-1) @ values).view(-1, *pooled.shape[2:])
    return CoarseResult(kept, pooled, None if text is None or pooled is None else _pooled_text(means, text, scale))


def _pooled_text(means: TileMeans, text: TextMeans, scale: float) -> torch.Tensor:
    """Return what the coarse attention gives the tiles of the text, float32 [B, H, N, head_dim]."""
    q = text.means.q
    batch, num_heads, num_tiles, head_dim = q.shape
    every, pooled = slice(None), torch.empty_like(q)
    assert means.v is not None
    for sample in range(batch):
        stacked = q[sample].reshape(means.k.shape[1], -1, head_dim)
        keys, values = (
            _joined(grid[sample], more, sample, every)
            for grid, more in ((means.k, text.means.k), (means.v, text.means.v))
        )
        scores = scale * stacked @ keys.transpose(1, 2)
        num_grid = means.k.shape[2]
        scores[..., num_grid:] = _without_padding(scores[..., num_grid:], text.tiles, sample)
        pooled[sample] = (scores.softmax(dim=-1) @ values).view(num_heads, num_tiles, head_dim)
    return pooled


def _joined(grid: torch.Tensor, text: torch.Tensor | None, sample: int, heads: slice) -> torch.Tensor:
    """Means of the grid's tiles, then of the text's, [heads, tiles, head_dim]."""
    assert text is not None
    return torch.cat([grid, text[sample, heads]], dim=1)


def _without_padding(scores: torch.Tensor, tiles: TextTiles, sample: int) -> torch.Tensor:
    """Scores [..., text tiles] of which those of padding alone are -inf."""
    is_empty = tiles.is_empty
    return scores if is_empty is None else scores.masked_fill(is_empty[sample], float("-inf"))
