"""Tensors under way between the processes of a group, and the buffers they travel in.

A transfer runs beside what is computed meanwhile: with NCCL on a stream of its own, which starts after what was queued
on the current stream and which `wait` makes the current stream wait for; no host waits. Buffers are allocated on the
current stream and kept alive until `wait`, so the allocator hands them out again in an order that is safe.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from diffusion_runtime.parallel.rank_group import RankGroup


@dataclass(frozen=True)
class MemberBlocks:
    """One buffer with a block for every member of a group, laid out as torch counts the members.

    buffer: one-dimensional. sizes: elements of each member's block, by member.
    """

    group: RankGroup
    buffer: torch.Tensor
    sizes: tuple[int, ...]

    @classmethod
    def empty(cls, group: RankGroup, sizes: Sequence[int], like: torch.Tensor) -> Self:
        """Room for blocks of these sizes, in the dtype and on the device of `like`."""
        return cls(group, like.new_empty(sum(sizes)), tuple(sizes))

    @property
    def sizes_by_place(self) -> list[int]:
        sizes = [0] * self.group.size
        for place, size in zip(self.group.places, self.sizes, strict=True):
            sizes[place] = size
        return sizes

    def block(self, member: int, shape: Sequence[int]) -> torch.Tensor:
        """A view of one member's block."""
        place = self.group.places[member]
        start = list(itertools.accumulate(self.sizes_by_place, initial=0))[place]
        return self.buffer[start : start + self.sizes[member]].view(*shape)

    def stacked(self, shape: Sequence[int]) -> torch.Tensor:
        """[members, *shape], for blocks of one shape; a view where torch counts the members alike."""
        assert set(self.sizes) == {math.prod(shape)}, (self.sizes, shape)
        blocks = self.buffer.view(self.group.size, *shape)
        if self.group.is_sorted:
            return blocks
        return torch.stack([blocks[place] for place in self.group.places])


@dataclass(frozen=True)
class Transfer:
    """Blocks that arrive, and what keeps those that were sent alive. Call `wait` once, before reading."""

    received: MemberBlocks
    sent: torch.Tensor
    works: tuple[Any, ...]

    def wait(self) -> MemberBlocks:
        for work in self.works:
            work.wait()
        return self.received


def start_all_to_all(sent: MemberBlocks, received_sizes: Sequence[int]) -> Transfer:
    """Every member gets its block of `sent`. received_sizes: elements that come from each member, by member."""
    group = sent.group
    if group.size == 1:
        return Transfer(sent, sent.buffer, ())
    received = MemberBlocks.empty(group, received_sizes, sent.buffer)
    work = dist.all_to_all_single(
        received.buffer,
        sent.buffer,
        received.sizes_by_place,
        sent.sizes_by_place,
        group=group.process_group,
        async_op=True,
    )
    return Transfer(received, sent.buffer, (work,))


@dataclass(frozen=True)
class Handover:
    """A tensor that arrives from the member before, while another one goes to the member after."""

    received: torch.Tensor
    sent: torch.Tensor
    works: tuple[Any, ...]

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def start_handover(group: RankGroup, sent: torch.Tensor, received_shape: Sequence[int]) -> Handover:
    """sent: contiguous; it goes to the next member, and one of received_shape comes from the one before."""
    received = sent.new_empty(tuple(received_shape))
    after = group.members[(group.index + 1) % group.size]
    before = group.members[(group.index - 1) % group.size]
    operations = [
        dist.P2POp(dist.isend, sent, after, group.process_group),
        dist.P2POp(dist.irecv, received, before, group.process_group),
    ]
    return Handover(received, sent, tuple(dist.batch_isend_irecv(operations)))


def all_gather(group: RankGroup, x: torch.Tensor) -> list[torch.Tensor]:
    """What every member holds, by member; all in one shape."""
    if group.size == 1:
        return [x]
    by_place = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(by_place, x.contiguous(), group=group.process_group)
    return [by_place[place] for place in group.places]
