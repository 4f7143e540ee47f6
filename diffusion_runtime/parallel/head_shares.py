"""Which heads each process of an Ulysses group computes: as evenly as whole heads allow, without padding heads."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ConfigError


@dataclass(frozen=True)
class HeadShare:
    """Query heads start to stop - 1, and the key head of each run of equal length among them.

    kv_heads: without repetition where the query heads divide evenly among them, else one per query head.
    """

    start: int
    stop: int
    kv_heads: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        return self.stop - self.start

    @property
    def num_kv_heads(self) -> int:
        return len(self.kv_heads)

    def take_kv(self, x: torch.Tensor) -> torch.Tensor:
        """The share's heads of x [batch, seq, kv_heads, head_dim]."""
        first, count = self.kv_heads[0], len(self.kv_heads)
        if self.kv_heads == tuple(range(first, first + count)):
            return x[:, :, first : first + count]
        # Not an index tensor: copying one to the device would wait for it.
        return torch.stack([x[:, :, head] for head in self.kv_heads], dim=2)


def check_head_count(num_heads: int, degree: int) -> None:
    """Raises ConfigError when there are fewer heads than processes to share them."""
    if degree > num_heads:
        valid = ", ".join(str(size) for size in range(1, num_heads + 1))
        even = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
        raise ConfigError(
            f"ulysses_degree {degree} is more than the {num_heads} attention heads of this model; valid degrees: "
            f"{valid} (shared evenly: {even}). Share the rest of the processes by ring_degree"
        )


@functools.lru_cache(maxsize=64)
def share_heads(
    num_heads: int, num_kv_heads: int, num_members: int, num_groups: int = 1
) -> tuple[tuple[HeadShare, ...], ...]:
    """[head groups][members]: the heads of each member, cut into groups that are computed one after the other.

    Query heads that share a key head stay together where there are enough key heads; else key heads are replicated.
    There are at most as many groups as the member with the fewest heads can fill, so no share is empty.
    """
    repeats = num_heads // num_kv_heads
    unit = repeats if num_kv_heads >= num_members else 1
    of_members = _cut(0, num_heads // unit, num_members)
    num_groups = min(num_groups, *(stop - start for start, stop in of_members))
    return tuple(
        tuple(_share(unit * start, unit * stop, repeats) for start, stop in of_group)
        for of_group in zip(*(_cut(*range_, num_groups) for range_ in of_members), strict=True)
    )


def _cut(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """[start, stop) cut into `count` ranges; the first ones are longer by one where it does not divide evenly."""
    length, longer = divmod(stop - start, count)
    starts = [start + index * length + min(index, longer) for index in range(count + 1)]
    return list(itertools.pairwise(starts))


def _share(start: int, stop: int, repeats: int) -> HeadShare:
    of_each = tuple(head // repeats for head in range(start, stop))
    whole = start % repeats == 0 and stop % repeats == 0
    if whole or of_each[0] == of_each[-1]:
        return HeadShare(start, stop, tuple(dict.fromkeys(of_each)))
    return HeadShare(start, stop, of_each)
