"""Sliding tile attention (Zhang et al., arXiv:2502.04507): every tile of queries sees a box of tiles around it.

Windows are static: one for all heads, or one for each denoising step, layer and head from a strategy file, which a
search over prompts can tune for a model. Any grid will do: the last tile of an axis holds what is left.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import MappingProxyType

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.sparse.interface import SparseBackend, check_grid, plan_of_call
from diffusion_runtime.attention.sparse.sliding_tile_options import NONE, SEARCHING, TUNING_CFG, SlidingTileOptions
from diffusion_runtime.attention.sparse.sliding_tile_search import (
    SearchRecorder,
    SearchSetup,
    check_same_setup,
    ends_request,
    find_search_logs,
    read_search_logs,
    tune,
)
from diffusion_runtime.attention.sparse.sliding_tile_strategy import (
    MaskStrategy,
    RunSize,
    head_groups,
    load_strategy,
    write_strategy,
)
from diffusion_runtime.attention.sparse.sliding_tile_windows import (
    attended_tiles,
    default_candidates,
    window_selection,
)
from diffusion_runtime.attention.sparse.tiles import tile_counts, tiles_of
from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.step_info import LayerInfo, StepInfo
from diffusion_runtime.token_layout import Extent, TokenLayout

_logger = logging.getLogger("diffusion_runtime.attention")
_SEARCH = "a search measures windows and goes on with full attention"


@register_backend
class SlidingTileBackend(SparseBackend):
    """Attention within windows of tiles, and the search that finds good windows."""

    name = "sliding_tile_attn"
    aliases = ("sta",)
    summary = "sliding tile attention: a static window of tiles, one per head when tuned"
    options_type = SlidingTileOptions
    self_test_options = MappingProxyType({"window": (1, 3, 3), "tile_size": (2, 2, 2)})

    def keeps_everything(self, options: SlidingTileOptions, layout: TokenLayout, layer: LayerInfo) -> str | None:  # noqa: ARG002
        if options.sta_mode == NONE:
            return "sta_mode is none"
        if options.sta_mode == SEARCHING:
            return _SEARCH
        return None

    def tile_of(self, options: SlidingTileOptions) -> Extent:
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
        if options.window is None or options.mask_strategy_file_path is not None or options.is_tuning:
            return None
        return math.prod(attended_tiles(num_tiles, options.window)) / math.prod(num_tiles)

    def check(self, options: SlidingTileOptions, layer: LayerInfo, num_heads: int, num_steps: int | None) -> None:
        """See Backend.check. A strategy that is still to be tuned is checked at the first call."""
        options.check_mode()
        options.check_heads(num_heads)
        if options.mask_strategy_file_path is not None:
            load_strategy(options.mask_strategy_file_path).check_fits(layer, num_heads, num_steps)
        if options.is_tuning and num_steps is not None:
            assert options.search_log_folder is not None, "check_mode asks for it"
            find_search_logs(options.search_log_folder)

    def replay_refusal(self, options: SlidingTileOptions) -> str | None:
        if options.sta_mode == SEARCHING:
            return "a search reads every distance at its step"
        if options.mask_strategy_file_path is not None or options.is_tuning:
            return "the windows of a strategy differ from step to step"
        return super().replay_refusal(options)

    def check_split_heads(self, options: SlidingTileOptions) -> None:
        if options.sta_mode == SEARCHING:
            raise ConfigError(
                f"sta_mode {SEARCHING} measures all heads of a layer in one process; search with ulysses_degree 1, "
                "ring_degree 1 and tensor_parallel_size 1, and generate with the tuned strategy on as many processes "
                "as you like"
            )

    def plan(self, call: AttentionCall) -> SparsePlan:
        layout = check_grid(self.name, call)
        self._check_run(call.options, layout, call.layer, call.step, call.state, call.num_heads_of_layer)
        return super().plan(call)

    def run(self, call: AttentionCall) -> AttentionResult:
        layout = check_grid(self.name, call)
        num_heads = call.num_heads_of_layer
        self._check_run(call.options, layout, call.layer, call.step, call.state, num_heads)
        if call.options.sta_mode == SEARCHING:
            return self._search(call, layout)
        return super().run(call)

    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        options: SlidingTileOptions = call.options
        num_tiles = tile_counts(call.grid_layout.grid, options.tile_size)
        run = RunSize(call.step.num_steps, call.layer.num_layers, call.num_heads_of_layer)
        strategy = _strategy_of(options, call.grid_layout, call.layer.role, run, call.state)
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
        strategy = _strategy_of(options, layout, layer.role, run, state)
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

    def _search(self, call: AttentionCall, layout: TokenLayout) -> AttentionResult:
        """Full attention; every candidate window is run beside it and its distance recorded."""
        result = self.run_dense(call, _SEARCH)
        # One log per branch and grid, whichever experts take its steps; progressive resolution changes the grid.
        recorders: dict[Extent, SearchRecorder] = call.state.request.get_or_create(
            (self.name, "search", call.options, call.layer.role, call.step.branch), dict
        )
        if layout.grid not in recorders:
            recorders[layout.grid] = _new_recorder(call, layout)
        recorder = recorders[layout.grid]
        num_tiles = tile_counts(layout.grid, call.options.tile_size)
        grid = slice(layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_grid_tokens)
        losses = []
        for window in recorder.setup.candidates:
            plan = _windowed_plan(call, (attended_tiles(num_tiles, window),))
            if plan.is_dense:
                losses.append(torch.zeros(2, call.q.shape[2], device=call.q.device))
                continue
            candidate = block_sparse_attention(call.q, call.k, call.v, plan, scale=call.scale).out
            difference = candidate[:, grid].float() - result.out[:, grid].float()
            losses.append(torch.stack([difference.square().mean((0, 1, 3)), difference.abs().mean((0, 1, 3))]))
        recorder.add(call.layer, call.step, torch.stack(losses, dim=1))
        if ends_request(call.layer, call.step):
            for of_grid in recorders.values():
                of_grid.write()
        return result


def _attended_by_head(options: SlidingTileOptions, num_tiles: Extent) -> tuple[Extent, ...]:
    """Tiles that every query tile sees along each axis, of each head of `head_windows`."""
    windows = options.head_windows or ()
    return tuple(num_tiles if window is None else attended_tiles(num_tiles, window) for window in windows)


def _group_of_head(by_head: tuple[Extent, ...], distinct: tuple[Extent, ...], device: torch.device) -> torch.Tensor:
    """int32 [heads]: which of the distinct windows each head uses."""
    indexes = [distinct.index(window) for window in by_head]
    return torch.tensor(indexes, dtype=torch.int32, device="cpu").to(device)


def _of_this_process(group_of: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Of [heads of the layer], those of the call, where processes share a layer's heads."""
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
    options: SlidingTileOptions, layout: TokenLayout, role: str, run: RunSize, state: RequestCache
) -> MaskStrategy | None:
    """The strategy of this request and grid, the same from its first call to its last; None where there is no file."""
    path = options.mask_strategy_file_path
    if not options.is_tuning and path is None:
        return None
    return state.request.get_or_create(
        (SlidingTileBackend.name, "strategy", options, role, layout.grid),
        lambda: _tuned_strategy(options, layout, role, run) if path is None else load_strategy(path),
    )


def _tuned_strategy(options: SlidingTileOptions, layout: TokenLayout, role: str, run: RunSize) -> MaskStrategy:
    """Tune from the logs, write the file, and read it as inference will. Raises ConfigError and OutputError."""
    assert options.search_log_folder is not None, "check_mode asks for it"
    logs = [log for log in read_search_logs(options.search_log_folder) if log.setup.role == role]
    if not logs:
        raise ConfigError(f"search_log_folder: {options.search_log_folder} holds no log of role {shown(role)}")
    # A search with progressive resolution leaves logs of every grid.
    logs = [log for log in logs if log.setup.grid == layout.grid] or logs
    setup = check_same_setup(logs)
    if (setup.grid, setup.tile_size) != (layout.grid, options.tile_size):
        raise ConfigError(
            f"search_log_folder: the logs are of a grid {setup.grid} in tiles {setup.tile_size}, this run has "
            f"{layout.grid} in tiles {options.tile_size}; generate at the size that was searched, with its tile_size"
        )
    searched = RunSize(setup.num_steps, setup.num_layers, setup.num_heads)
    if searched != run:
        raise ConfigError(
            f"search_log_folder: the logs are of {searched}, this run has {run}; tune with the model and the "
            "num_inference_steps that were searched"
        )
    merge = options.sta_mode == TUNING_CFG
    strategy = tune(logs, skip_time_steps=options.num_full_steps, merge_branches=merge)
    write_strategy(strategy, options.tuned_file)
    _logger.info("%s: wrote %s, %s", options.sta_mode, options.tuned_file, strategy.source)
    return load_strategy(str(options.tuned_file))


def _new_recorder(call: AttentionCall, layout: TokenLayout) -> SearchRecorder:
    options: SlidingTileOptions = call.options
    num_tiles = tile_counts(layout.grid, options.tile_size)
    candidates = options.candidates or default_candidates(num_tiles)
    if not candidates:
        raise ConfigError(
            f"sliding_tile_attn: every window holds the whole grid {layout.grid}, which is {num_tiles} tiles of "
            f"{options.tile_size} tokens; there is nothing to search. Give a smaller tile_size, such as "
            "tile_size=[2,4,4]"
        )
    setup = SearchSetup(
        candidates=candidates,
        grid=layout.grid,
        tile_size=options.tile_size,
        num_steps=call.step.num_steps,
        num_layers=call.layer.num_layers,
        num_heads=call.q.shape[2],
        role=call.layer.role,
    )
    assert options.search_log_folder is not None, "check_mode asks for it"
    return SearchRecorder(setup, call.step.branch, call.q.shape[0], Path(options.search_log_folder))
