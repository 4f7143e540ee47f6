"""Split-KV: attention whose last wave of tiles would leave much of a GPU idle, with the keys of its queries cut up.

A kernel gives every tile of queries of a head to one multiprocessor. 4,680 queries of 12 heads are 444 tiles of 128: on
132 multiprocessors three full waves, and a fourth of 48 tiles, which takes as long (wave quantisation). Here the
queries of the full waves are one call, and those that are left over see the keys in parts, as if the parts were
samples, so that there are tiles for every multiprocessor; the parts are merged by their log-sum-exps (Flash-Decoding,
Dao et al., 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from diffusion_runtime.kernels.split_kv.api import merge_parts

# (q, k, v, return_lse) -> (out, lse). Attention to all keys of dense tensors, shapes as in merge_parts.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor | None]]

MAX_PARTS = 16
# Keys of a part: below, what begins and ends a tile shows.
_SHORTEST_PART = 1024
# What another part costs, and how much a split is to save, in keys of one wave, each 12 ns on an H200: there a part
# cost 5 us, and the launches of a second call and of the merging 0.1 ms of a processor
# (benchmarks/results/split_kv_gpu.json).
_KEYS_OF_A_PART = 400
_LEAST_KEYS = 8192
# Of the time of one call. Below, results would change for a gain that a clock hides.
_LEAST_SHARE = 0.05


class KeySplit(NamedTuple):
    """num_whole: the first queries, which see all keys in one call. num_parts: of the keys, for the other queries."""

    num_whole: int
    num_parts: int


@functools.lru_cache(maxsize=1024)
def plan_split(num_queries: int, num_keys: int, num_rows: int, tile: int, num_processors: int) -> KeySplit | None:
    """The split that takes the least time, None where one call does. num_rows: heads of all samples together; tile:
    queries of one; num_processors: tiles that run at once."""
    num_tiles = -(-num_queries // tile)
    waves = num_tiles * num_rows / num_processors
    whole_tiles = int(waves) * num_processors // num_rows
    left_over = num_tiles - whole_tiles
    if left_over <= 0:
        return None

    whole_waves = -(-whole_tiles * num_rows // num_processors)

    def keys_of(num_parts: int) -> float:
        """The time of a split, in keys of one wave."""
        of_parts = -(-left_over * num_rows * num_parts // num_processors) / num_parts
        return (whole_waves + of_parts) * num_keys + _KEYS_OF_A_PART * num_parts

    fitting = [n for n in range(2, MAX_PARTS + 1) if num_keys % n == 0 and num_keys // n >= _SHORTEST_PART]
    if not fitting:
        return None
    best = min(fitting, key=keys_of)
    keys_of_one_call = -(-num_tiles * num_rows // num_processors) * num_keys
    if keys_of_one_call - keys_of(best) < max(_LEAST_KEYS, _LEAST_SHARE * keys_of_one_call):
        return None
    return KeySplit(whole_tiles * tile, best)


def can_split(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether parts of the keys can be seen as samples without a copy: samples lie one behind the other."""
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v))


def attend_split(
    split: KeySplit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend, *, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and lse, as `attend` returns them, of tensors that `can_split`."""
    num_whole, num_parts = split
    batch, num_queries = q.shape[:2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    whole_lse = None
    if num_whole:
        whole, whole_lse = attend(q[:, :num_whole], k, v, return_lse)
        out[:, :num_whole] = whole
    of_parts = q[:, None, num_whole:].expand(batch, num_parts, *(num_queries - num_whole, *q.shape[2:])).flatten(0, 1)
    partial, partial_lse = attend(of_parts, _as_samples(k, num_parts), _as_samples(v, num_parts), True)
    assert partial_lse is not None, "it was asked for"
    lse = merge_parts(partial, partial_lse, out[:, num_whole:])
    if not return_lse:
        return out, None
    return out, lse if whole_lse is None else torch.cat([whole_lse, lse], dim=2)


def _as_samples(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    """[batch, seq, ...] as [batch * num_parts, seq / num_parts, ...]."""
    return x.reshape(x.shape[0] * num_parts, x.shape[1] // num_parts, *x.shape[2:])
