"""A process group with an order of its own among its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """members: ranks in the world, in this group's order; index: which of them is this process.

    process_group: torch's; None for a single process. places: each member's index in torch's group, which is sorted by
    rank.
    """

    members: tuple[int, ...] = (0,)
    index: int = 0
    process_group: ProcessGroup | None = None
    places: tuple[int, ...] = (0,)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # A copied model uses the same process groups: torch's groups are handles and cannot be copied.
        return self

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def is_sorted(self) -> bool:
        """Whether torch's order of the members is this group's."""
        return self.places == tuple(range(self.size))

    @classmethod
    def of(cls, process_group: ProcessGroup, members: Sequence[int] | None = None) -> Self:
        """Wrap an existing torch group that contains this process. members: its ranks in the world, in another
        order."""
        by_place = dist.get_process_group_ranks(process_group)
        members = by_place if members is None else members
        places = tuple(by_place.index(rank) for rank in members)
        return cls(tuple(members), list(members).index(dist.get_rank()), process_group, places)

    @classmethod
    def create(cls, rows: Sequence[Sequence[int]], rank: int, timeout: timedelta | None = None) -> Self:
        """Create one group per row of world ranks, on every process alike, and return the one that holds `rank`.

        timeout: of its collectives; None is torch's default, half an hour for gloo, whatever the world's is.
        """
        mine = cls((rank,))
        for members in rows:
            if len(members) == 1:
                continue
            process_group = dist.new_group(list(members), timeout=timeout)
            if rank in members:
                mine = cls.of(process_group, members)
        return mine
