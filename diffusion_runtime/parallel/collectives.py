"""Process groups with an order of their own, and asynchronous collectives between their processes: all-to-all,
all-gather, all-reduce, send/receive, with their buffers.

A transfer overlaps with computation. With NCCL it runs on a stream of its own, which starts after what was queued on
the current stream; `wait` makes the current stream wait for it, and no host thread waits. Buffers are allocated on the
current stream and kept alive until `wait`, so the allocator reuses them in a safe order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from diffusion_runtime.errors import BackendInaccurateError

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
        """True if torch orders the members as this group does."""
        return self.places == tuple(range(self.size))

    @property
    def backend(self) -> str:
        """torch's name of what the processes exchange by: `nccl`, `gloo`; empty for one process."""
        return "" if self.process_group is None else str(dist.get_backend(self.process_group))

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


@dataclass(frozen=True)
class MemberBlocks:
    """One buffer with one block per member of a group, in the order in which torch counts the members.

    buffer: one-dimensional. sizes: elements of each member's block, by member.
    """

    group: RankGroup
    buffer: torch.Tensor
    sizes: tuple[int, ...]

    @classmethod
    def empty(cls, group: RankGroup, sizes: Sequence[int], like: torch.Tensor) -> Self:
        """Return an empty buffer for blocks of these sizes, in the dtype and on the device of `like`."""
        return cls(group, like.new_empty(sum(sizes)), tuple(sizes))

    @property
    def sizes_by_place(self) -> list[int]:
        sizes = [0] * self.group.size
        for place, size in zip(self.group.places, self.sizes, strict=True):
            sizes[place] = size
        return sizes

    def block(self, member: int, shape: Sequence[int]) -> torch.Tensor:
        """Return a view of one member's block."""
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
    """Blocks being received, and a reference that keeps the sent ones alive. Call `wait` once, before reading."""

    received: MemberBlocks
    sent: torch.Tensor
    works: tuple[Any, ...]

    def wait(self) -> MemberBlocks:
        for work in self.works:
            work.wait()
        return self.received


def start_all_to_all(sent: MemberBlocks, received_sizes: Sequence[int]) -> Transfer:
    """Start an all-to-all: every member receives its block of `sent`. received_sizes: elements received from each
    member, by member."""
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
    """One step of a ring: a tensor being received from the previous member, while another is sent to the next."""

    received: torch.Tensor
    sent: torch.Tensor
    works: tuple[Any, ...]

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def start_handover(group: RankGroup, sent: torch.Tensor, received_shape: Sequence[int]) -> Handover:
    """Start one step of a ring. `sent` (contiguous) goes to the next member; a tensor of received_shape comes from the
    previous one."""
    received = sent.new_empty(tuple(received_shape))
    after = group.members[(group.index + 1) % group.size]
    before = group.members[(group.index - 1) % group.size]
    operations = [
        dist.P2POp(dist.isend, sent, after, group.process_group),
        dist.P2POp(dist.irecv, received, before, group.process_group),
    ]
    return Handover(received, sent, tuple(dist.batch_isend_irecv(operations)))


def all_gather(group: RankGroup, x: torch.Tensor) -> list[torch.Tensor]:
    """Gather the tensors of all members, by member; all of one shape."""
    if group.size == 1:
        return [x]
    by_place = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(by_place, x.contiguous(), group=group.process_group)
    return [by_place[place] for place in group.places]


def sum_in_place(group: RankGroup, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all members' tensors of one shape (all-reduce), the same bits on each of them. x: overwritten
    and returned where it is contiguous, else a new tensor."""
    if group.size == 1 or x.is_meta:
        return x
    x = x.contiguous()
    dist.all_reduce(x, group=group.process_group)
    return x


def gather_features(group: RankGroup, x: torch.Tensor) -> torch.Tensor:
    """Return the last dimensions of all members' tensors side by side, by member: [..., n] to [..., members * n]."""
    if group.size == 1:
        return x
    if x.is_meta:
        return x.new_empty(*x.shape[:-1], group.size * x.shape[-1])
    return torch.cat(all_gather(group, x), dim=-1)


# A reason that is longer is cut off: all processes send as many bytes.
_MAX_BYTES = 1000


def reasons_of(group: RankGroup, reason: str | None, device: torch.device | None) -> list[str | None]:
    """Return the reason that each member gives, by member; None for a member without one. A collective call of all
    members, which waits for the device. device: where the group's tensors are; None for one process, which sends none.
    """
    if group.size == 1:
        return [reason]
    written = b"" if reason is None else (reason.encode()[:_MAX_BYTES] or b" ")
    # Room for the length in front.
    padded = len(written).to_bytes(2, "big") + written.ljust(_MAX_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    return [_read(bytes(each.cpu().tolist())) for each in all_gather(group, sent)]


def agreed_refusal(group: RankGroup, reason: str | None, device: torch.device | None) -> str | None:
    """Return why no member of the group proceeds, the same decision on all of them: the own reason, else that of the
    first member with one, or None. A collective call."""
    found = reasons_of(group, reason, device)
    if reason is not None:
        return reason
    return next((f"rank {rank}: {each}" for rank, each in zip(group.members, found, strict=True) if each), None)


@contextlib.contextmanager
def inaccurate_alike(group: RankGroup, device: torch.device) -> Iterator[None]:
    """Context manager: where the attention of one member is too inaccurate for a model, all members end with message
    and reasons of the first of them, as they would otherwise wait for it. A collective call at its end, which waits for
    the device.

    Raises BackendInaccurateError.
    """
    own: BackendInaccurateError | None = None
    try:
        yield
    except BackendInaccurateError as error:
        own = error
    written = None if own is None else "\n".join(map("\t".join, own.reasons)) + f"\n\n{own}"
    first = next(filter(None, reasons_of(group, written, device)), None)
    if first is not None:
        reasons, _, message = first.partition("\n\n")
        pairs = (line.partition("\t") for line in reasons.splitlines())
        raise BackendInaccurateError(message, [(name, reason) for name, _, reason in pairs]) from own


def _read(padded: bytes) -> str | None:
    length = int.from_bytes(padded[:2], "big")
    return padded[2 : 2 + length].decode(errors="replace") if length else None
