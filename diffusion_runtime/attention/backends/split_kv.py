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

from diffusion_runtime.kernels.split_kv import merge_parts

# (q, k, v) -> (out, lse). Attention to all keys of dense tensors; out [batch, seq, heads, head_dim] and lse float32,
# [batch, heads, seq].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

MAX_PARTS = 16
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

    def waves_of(num_tiles: int) -> int:
        return -(-num_tiles * num_rows // num_processors)

    def keys_of(split: KeySplit) -> float:
        """The time of a split, in keys of one wave."""
        whole_tiles, num_parts = split.num_whole // tile, split.num_parts
        of_parts = waves_of((num_tiles - whole_tiles) * num_parts) / num_parts
        return (waves_of(whole_tiles) + of_parts) * num_keys + _KEYS_OF_A_PART * num_parts

    num_tiles = -(-num_queries // tile)
    fitting = [n for n in range(2, MAX_PARTS + 1) if num_keys % n == 0]
    full_waves = num_tiles * num_rows // num_processors
    if not fitting or num_rows == 0 or num_tiles * num_rows % num_processors == 0:
        return None
    # The full waves, one less, or none as one call.
    wholes = {waves * num_processors // num_rows * tile for waves in (full_waves, max(0, full_waves - 1), 0)}
    splits = [KeySplit(whole, parts) for whole in sorted(wholes, reverse=True) for parts in fitting]
    best = min((split for split in splits if split.num_whole < num_queries), key=keys_of, default=None)
    keys_of_one_call = waves_of(num_tiles) * num_keys
    if best is None or keys_of_one_call - keys_of(best) < max(_LEAST_KEYS, _LEAST_SHARE * keys_of_one_call):
        return None
    return best


def can_split(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether parts of the keys can be viewed as samples without a copy: samples lie one behind the other."""
    return all(x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (k, v))


def attend_split(
    split: KeySplit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, as `attend` returns them, of tensors that `can_split`."""
    num_whole, num_parts = split
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A copy: kernels are compiled for strides that are 0, which those of one sample would be.
    of_parts = q[:, num_whole:].repeat_interleave(num_parts, dim=0)
    parts = attend(of_parts, _as_samples(k, num_parts), _as_samples(v, num_parts))
    lse = merge_parts(*parts, out[:, num_whole:])
    if num_whole:
        out[:, :num_whole], whole_lse = attend(q[:, :num_whole], k, v)
        lse = torch.cat([whole_lse, lse], dim=2)
    return out, lse


def _as_samples(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    """[batch, seq, ...] as [batch * num_parts, seq / num_parts, ...]."""
    return x.reshape(x.shape[0] * num_parts, x.shape[1] // num_parts, *x.shape[2:])
