"""Sliding tile attention (Zhang et al., arXiv:2502.04507): every tile of queries sees a box of tiles around it.

Windows are static: one for all heads, one for each head, or one for each denoising step, layer and head from a strategy
file; `tune` chooses them for a model. Any grid will do: the last tile of an axis holds what is left.
"""

from __future__ import annotations

import logging
import math
from types import MappingProxyType

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.sparse.interface import SparseBackend, check_grid, plan_of_call
from diffusion_runtime.attention.sparse.sliding_tile_options import NONE, SlidingTileOptions
from diffusion_runtime.attention.sparse.sliding_tile_strategy import (
    MaskStrategy,
    RunSize,
    head_groups,
    load_strategy,
)
from diffusion_runtime.attention.sparse.sliding_tile_windows import (
    attended_tiles,
    window_selection,
)
from diffusion_runtime.attention.sparse.tiles import tile_counts, tiles_of
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan

_logger = logging.getLogger("diffusion_runtime.attention")


@register_backend
class SlidingTileBackend(SparseBackend):
    """Attention within windows of tiles."""

    name = "sliding_tile_attn"
    aliases = ("sta",)
    summary = "sliding tile attention: a static window of tiles, one per head when tuned"
    options_type = SlidingTileOptions
    self_test_options = MappingProxyType({"window": (1, 3, 3), "tile_size": (2, 2, 2)})

    def keeps_everything(self, options: SlidingTileOptions, layout: TokenLayout, layer: LayerInfo) -> str | None:  # noqa: ARG002
        if options.sta_mode == NONE:
            return "sta_mode is none"
        return None

    def tile_of(self, options: SlidingTileOptions, grid: Extent) -> Extent:  # noqa: ARG002
        return options.tile_size

    def preferred_tile(self, options: SlidingTileOptions, layout: TokenLayout, layer: LayerInfo) -> Extent | None:
        num_tiles = tile_counts(layout.grid, options.tile_size)
        if options.window is not None and attended_tiles(num_tiles, options.window) == num_tiles:
            return None
        return super().preferred_tile(options, layout, layer)

    def sparse_density(self, options: SlidingTileOptions, layout: TokenLayout, layer: LayerInfo) -> float | None:  # noqa: ARG002
        """None for a strategy, whose windows differ from head to head and from step to step."""
        num_tiles = tile_counts(layout.grid, options.tile_size)
        if options.head_windows is not None:
            shares = [math.prod(seen) / math.prod(num_tiles) for seen in _attended_by_head(options, num_tiles)]
            return sum(shares) / len(shares)
        if options.window is None or options.mask_strategy_file_path is not None:
            return None
        return math.prod(attended_tiles(num_tiles, options.window)) / math.prod(num_tiles)

    def check(self, options: SlidingTileOptions, layer: LayerInfo, num_heads: int, num_steps: int | None) -> None:
        """Check that the options can serve a layer, as Backend.check describes."""
        options.check_mode()
        options.check_heads(num_heads)
        if options.mask_strategy_file_path is not None:
            load_strategy(options.mask_strategy_file_path).check_fits(layer, num_heads, num_steps)

    def depends_on_step(self, options: SlidingTileOptions, layer: LayerInfo) -> bool:
        return options.mask_strategy_file_path is not None or super().depends_on_step(options, layer)

    def replay_refusal(self, options: SlidingTileOptions) -> str | None:
        if options.mask_strategy_file_path is not None:
            return "the windows of a strategy differ from step to step"
        return super().replay_refusal(options)

    def plan(self, call: AttentionCall) -> SparsePlan:
        layout = check_grid(self.name, call)
        self._check_run(call.options, layout, call.layer, call.step, call.state, call.num_heads_of_layer)
        return super().plan(call)

    def run(self, call: AttentionCall) -> AttentionResult:
        layout = check_grid(self.name, call)
        self._check_run(call.options, layout, call.layer, call.step, call.state, call.num_heads_of_layer)
        return super().run(call)

    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        options: SlidingTileOptions = call.options
        num_tiles = tile_counts(call.grid_layout.grid, options.tile_size)
        run = RunSize(call.step.num_steps, call.layer.num_layers, call.num_heads_of_layer)
        strategy = _strategy_of(options, call.grid_layout, call.layer.role, call.state)
        if options.head_windows is not None:
            by_head = _attended_by_head(options, num_tiles)
            distinct = tuple(sorted(set(by_head)))
            group_of = call.state.request.compute_once(_group_of_head, by_head, distinct, call.q.device)
            return _windowed_plan(call, distinct, _of_this_process(group_of, call))
        if strategy is None:
            assert options.window is not None, "check_mode asks for one of the two"
            return _windowed_plan(call, (attended_tiles(num_tiles, options.window),))
        groups = call.state.request.compute_once(head_groups, strategy, num_tiles, run, call.q.device)
        moment = (call.step.index, call.layer.index)
        return _windowed_plan(call, groups.attended[moment], _of_this_process(groups.group_of[moment], call))

    def _check_run(
        self,
        options: SlidingTileOptions,
        layout: TokenLayout,
        layer: LayerInfo,
        step: StepInfo,
        state: RequestCache,
        num_heads: int,
    ) -> None:
        """Checks of mode, strategy and run, made for dense steps too. Raises ConfigError."""
        options.check_mode()
        options.check_heads(num_heads)
        run = RunSize(step.num_steps, layer.num_layers, num_heads)
        strategy = _strategy_of(options, layout, layer.role, state)
        if strategy is None:
            return
        strategy.check_fits(layer, num_heads, step.num_steps)
        unnamed = strategy.unnamed(run)
        if unnamed and state.is_first(f"{self.name}: unnamed: {unnamed}: {options}"):
            _logger.warning(
                "%s: %s has no window for %s, which attend to everything; if it was tuned for so many alone, it does "
                "not fit this run",
                self.name,
                strategy.source,
                unnamed,
            )
        if step.num_steps <= options.num_full_steps and state.is_first(f"{self.name}: all full: {options}"):
            _logger.warning(
                "%s: skip_time_steps %d keeps all %d steps full; set a smaller one",
                self.name,
                options.num_full_steps,
                step.num_steps,
            )


def _attended_by_head(options: SlidingTileOptions, num_tiles: Extent) -> tuple[Extent, ...]:
    """Tiles that every query tile sees along each axis, of each head of `head_windows`."""
    windows = options.head_windows or ()
    return tuple(num_tiles if window is None else attended_tiles(num_tiles, window) for window in windows)


def _group_of_head(by_head: tuple[Extent, ...], distinct: tuple[Extent, ...], device: torch.device) -> torch.Tensor:
    """int32 [heads]: which of the distinct windows each head uses."""
    indexes = [distinct.index(window) for window in by_head]
    return torch.tensor(indexes, dtype=torch.int32, device="cpu").to(device)


def _of_this_process(group_of: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return the part of `group_of` [heads of the layer] for the call's heads, where processes share a layer's
    heads."""
    if call.num_heads == call.num_heads_of_layer:
        return group_of
    return group_of[call.inputs.first_head : call.inputs.first_head + call.num_heads]


def _windowed_plan(
    call: AttentionCall, attended: tuple[Extent, ...], group_of_head: torch.Tensor | None = None
) -> SparsePlan:
    """group_of_head: int32 [heads], which of the windows each head uses; None when there is one."""
    device = call.q.device
    num_tiles = tile_counts(call.grid_layout.grid, call.options.tile_size)
    geometry = tiles_of(call, call.options.tile_size)
    selection = call.state.request.compute_once(window_selection, num_tiles, attended, device)
    shape = (call.batch, call.num_heads)
    if group_of_head is None:
        group_of = torch.zeros(shape, dtype=torch.int32, device=device)
    else:
        group_of = group_of_head.expand(shape).contiguous()
    return plan_of_call(
        SlidingTileBackend.name,
        call,
        q=geometry,
        kv=geometry,
        group_of=group_of,
        kv_count=selection.kv_count,
        kv_index=selection.kv_index,
        is_dense=selection.is_full,
    )


def _strategy_of(
    options: SlidingTileOptions, layout: TokenLayout, role: str, state: RequestCache
) -> MaskStrategy | None:
    """The strategy of this request and grid, the same from its first call to its last; None where there is no file."""
    path = options.mask_strategy_file_path
    if path is None:
        return None
    return state.request.get_or_create(
        (SlidingTileBackend.name, "strategy", options, role, layout.grid),
        lambda: load_strategy(path),
    )
