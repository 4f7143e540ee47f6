"""From search logs to a mask strategy: the closest window of each step, layer and head (arXiv:2502.04507)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from diffusion_runtime.attention.sparse.sliding_tile_options import DEFAULT_SKIP_TIME_STEPS
from diffusion_runtime.attention.sparse.sliding_tile_search import SearchLog, SearchSetup
from diffusion_runtime.attention.sparse.sliding_tile_strategy import MaskStrategy
from diffusion_runtime.attention.sparse.tiles import Extent, tile_counts
from diffusion_runtime.errors import ConfigError


def tune(
    logs: Sequence[SearchLog], *, skip_time_steps: int = DEFAULT_SKIP_TIME_STEPS, merge_branches: bool = False
) -> MaskStrategy:
    """For every (step, layer, head) the candidate with the smallest L2 loss, averaged over the samples of the logs.

    The first of equal candidates wins. The first `skip_time_steps` steps, and what no log has measured, get the full
    window. Nothing weighs what a window costs: of candidates that contain each other the largest wins.

    merge_branches: average the conditional and the unconditional logs; without it the unconditional ones are left out.

    Raises ConfigError when the logs differ in what was searched, or none is of a branch that was asked for.
    """
    setup = check_same_setup(logs)
    chosen = _logs_of_branches(logs, merge_branches)
    full = tile_counts(setup.grid, setup.tile_size)
    windows: dict[tuple[int, int, int], Extent] = {}
    for step in range(setup.num_steps):
        for layer in range(setup.num_layers):
            best = None if step < skip_time_steps else _closest_candidates(chosen, step, layer)
            for head in range(setup.num_heads):
                windows[step, layer, head] = full if best is None else setup.candidates[best[head]]
    source = f"the strategy tuned from {len(chosen)} logs"
    return MaskStrategy(windows, setup.num_steps, setup.num_layers, setup.num_heads, source)


def check_same_setup(logs: Sequence[SearchLog]) -> SearchSetup:
    """What all the logs share. Raises ConfigError that names the first difference."""
    if not logs:
        raise ConfigError("tune: expected one search log or more, got none")
    first = logs[0]
    for log in logs[1:]:
        for field in dataclasses.fields(SearchSetup):
            here, there = getattr(first.setup, field.name), getattr(log.setup, field.name)
            if here != there:
                raise ConfigError(
                    f"search logs differ in {field.name}: {first.source} has {here}, {log.source} has {there}; keep "
                    "the logs of one search in a folder of their own"
                )
    return first.setup


def _logs_of_branches(logs: Sequence[SearchLog], merge_branches: bool) -> list[SearchLog]:
    seen = {log.branch for log in logs}
    if merge_branches and not ("both" in seen or {"cond", "uncond"} <= seen):
        raise ConfigError(
            f"sta_mode=STA_tuning_cfg merges both guidance branches, the logs are of {', '.join(sorted(seen))} alone; "
            "search with guidance_scale above 1, or use sta_mode=STA_tuning"
        )
    chosen = [log for log in logs if merge_branches or log.branch != "uncond"]
    if not chosen:
        raise ConfigError(
            "sta_mode=STA_tuning reads the conditional branch, the logs are of uncond alone; search again, or add the "
            "logs of the conditional branch"
        )
    return chosen


def _closest_candidates(logs: Sequence[SearchLog], step: int, layer: int) -> list[int] | None:
    """The index of the best candidate of each head; None when no log has measured this layer at this step."""
    key = (step, layer)
    measured = [(log.num_samples, log.l2[key]) for log in logs if key in log.l2]
    if not measured:
        return None
    mean = torch.stack([weight * l2 for weight, l2 in measured]).sum(0) / sum(weight for weight, _ in measured)
    # min over an axis promises no order among equals; the first one is wanted.
    return [int((column == column.min()).nonzero()[0, 0]) for column in mean.unbind(1)]
