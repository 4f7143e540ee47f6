"""Rotary positions of frames whose keys are cached: their places in the video, or among the frames in sight."""

from __future__ import annotations

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.layers.rope import grid_rotations, position_rotations, split_head_dim
from diffusion_runtime.parallel.sharding import SequenceSharding


def with_positions(
    cache: FrameCache, grid: tuple[int, int, int], head_dim: int, sharding: SequenceSharding, device: torch.device
) -> FrameCache:
    """Return the cache of a forward pass over a grid of tokens, with the rotations that its `positions` ask for."""
    if cache.positions == "window":
        return cache.with_rotations(*_among_frames_in_sight(cache.plan, grid, head_dim, device))
    box = (cache.plan.frames, range(grid[1]), range(grid[2]))
    return cache.with_rotations(sharding.shard(position_rotations(box, split_head_dim(head_dim), device), 0))


def _among_frames_in_sight(
    plan: CachePlan, grid: tuple[int, int, int], head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotations of the queries and keys of a forward pass whose positions in time are ranks among the
    visible frames: ([tokens of the grid, head_dim / 2], [plan.num_keys, head_dim / 2]). grid: of the queries."""
    whole = grid_rotations((len(plan.key_frames), *grid[1:]), head_dim, device)
    by_rank = torch.unflatten(whole, 0, (len(plan.key_frames), -1))
    queries, keys = (by_rank[plan.ranks(frames)].flatten(0, 1) for frames in (plan.frames, plan.key_frames))
    return queries, keys
