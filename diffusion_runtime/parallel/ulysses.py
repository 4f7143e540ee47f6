"""Ulysses sequence parallel: every process attends to the whole sequence with part of the heads (Jacobs et al.,
arXiv:2309.14509).

One all-to-all turns slices of the sequence with all heads into the sequence with a slice of the heads; a second one
turns the result back. q, k, v and gate share one buffer. Every process has the whole text already, so its rows are not
sent on the way in; on the way out each process receives all heads of its text from those that computed them. Only the
last slices of the grid are padded, and that padding is removed before attention. Heads that do not divide evenly are
shared unevenly instead.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.collectives import MemberBlocks, RankGroup, Transfer, start_all_to_all
from diffusion_runtime.parallel.interface import AttentionInputs, Exchange, Run
from diffusion_runtime.parallel.sharding import Slices, around, rows, slices_of


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
        """Take the share's heads of x [batch, seq, kv_heads, head_dim]."""
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


@dataclass(frozen=True)
class UlyssesExchange(Exchange):
    """All-to-alls within `group`.

    num_head_groups: the heads of a process are computed in this many groups, and the all-to-all of the next group
    overlaps with the computation of the current one; 1 for no overlap. ring_index of ring_size: which run of slices
    this group holds, when a ring shares the sequence as well; `run` then gets that run alone.
    """

    group: RankGroup
    num_head_groups: int = 1
    ring_index: int = 0
    ring_size: int = 1

    needs_lse = False

    @property
    def splits_heads(self) -> bool:
        return self.group.size > 1

    def check(self, num_heads: int, num_kv_heads: int, *, causal: bool) -> None:  # noqa: ARG002
        check_head_count(num_heads, self.group.size)

    def with_every_key(self, num_heads: int) -> Exchange | None:  # noqa: ARG002
        # A plan is made once for all heads of a process, so all of them go in one group.
        return dataclasses.replace(self, num_head_groups=1) if self.ring_size == 1 else None

    def describe(self) -> str:
        groups = f" in {self.num_head_groups} head groups" if self.num_head_groups > 1 else ""
        return f"ulysses {self.group.size}{groups}" if self.group.size > 1 else ""

    def attend(self, inputs: AttentionInputs, run: Run) -> torch.Tensor:
        if self.group.size == 1 and self.ring_size == 1:
            return run(inputs)[0]
        slices = slices_of(inputs, self.group.size * self.ring_size)
        groups = share_heads(inputs.q.shape[2], inputs.k.shape[2], self.group.size, self.num_head_groups)
        arriving = [self._send_inputs(inputs, slices, groups[0])]
        leaving: list[Transfer] = []
        for index, shares in enumerate(groups):
            if index + 1 < len(groups):
                arriving.append(self._send_inputs(inputs, slices, groups[index + 1]))
            part = self._assemble(arriving[index].wait(), inputs, slices, shares[self.group.index])
            leaving.append(self._send_out(run(part)[0], slices, shares))
        batch, local_rows, num_heads, head_dim = inputs.q.shape
        out = inputs.q.new_empty(batch, local_rows, num_heads, head_dim)
        for transfer, shares in zip(leaving, groups, strict=True):
            blocks = transfer.wait()
            for member, share in enumerate(shares):
                shape = (batch, local_rows, share.num_heads, head_dim)
                out[:, :, share.start : share.stop] = blocks.block(member, shape)
        return out

    def _send_inputs(self, inputs: AttentionInputs, slices: Slices, shares: Sequence[HeadShare]) -> Transfer:
        """Send this process's slice of the grid, to each member the heads it computes; [batch, slice, heads,
        head_dim]."""
        batch, head_dim = inputs.q.shape[0], inputs.q.shape[3]
        has_gate = inputs.gate is not None
        sizes = [batch * slices.length * _num_rows_of_heads(share, has_gate) * head_dim for share in shares]
        sent = MemberBlocks.empty(self.group, sizes, inputs.q)
        for member, share in enumerate(shares):
            block = sent.block(member, (batch, slices.length, _num_rows_of_heads(share, has_gate), head_dim))
            start = 0
            for tensor in _tensors_of(inputs, share):
                block[:, :, start : start + tensor.shape[2]] = rows(tensor, slices.num_prefix, slices.length)
                start += tensor.shape[2]
        return start_all_to_all(sent, [sizes[self.group.index]] * self.group.size)

    def _assemble(
        self, blocks: MemberBlocks, inputs: AttentionInputs, slices: Slices, share: HeadShare
    ) -> AttentionInputs:
        """Assemble the whole sequence, or the ring's run of it, with the heads of `share`."""
        batch, head_dim = inputs.q.shape[0], inputs.q.shape[3]
        num_packed = _num_rows_of_heads(share, inputs.gate is not None)
        stacked = blocks.stacked((batch, slices.length, num_packed, head_dim))
        # A view for a batch of one, where slice follows slice in the buffer already.
        grid = stacked.transpose(0, 1).reshape(batch, self.group.size * slices.length, num_packed, head_dim)
        grid = rows(grid, 0, slices.num_real(self.ring_index * self.group.size, self.group.size))
        whole = []
        start = 0
        for tensor in _tensors_of(inputs, share):
            of_grid = grid[:, :, start : start + tensor.shape[2]]
            prefix = rows(tensor, 0, slices.num_prefix)
            suffix = rows(tensor, tensor.shape[1] - slices.num_suffix, slices.num_suffix)
            whole.append(around(prefix, of_grid, suffix))
            start += tensor.shape[2]
        mask = inputs.mask
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, share.start : share.stop]
        return AttentionInputs(
            q=whole[0],
            k=whole[1],
            v=whole[2],
            layout=inputs.layout,
            gate=whole[3] if inputs.gate is not None else None,
            mask=mask,
            first_head=inputs.first_head + share.start,
            num_heads_total=inputs.num_heads_total,
        )

    def _send_out(self, out: torch.Tensor, slices: Slices, shares: Sequence[HeadShare]) -> Transfer:
        """Send to each member its text and its slice of the grid, with the heads computed here."""
        batch, num_rows, num_heads, head_dim = out.shape
        local_rows = slices.length + slices.num_text
        received = [batch * local_rows * share.num_heads * head_dim for share in shares]
        size = batch * local_rows * num_heads * head_dim
        num_real = num_rows - slices.num_text
        if slices.num_text == 0 and batch == 1 and num_real == self.group.size * slices.length and self.group.is_sorted:
            # The slices are contiguous already.
            sent = MemberBlocks(self.group, out.contiguous().view(-1), (size,) * self.group.size)
            return start_all_to_all(sent, received)
        sent = MemberBlocks.empty(self.group, [size] * self.group.size, out)
        for member in range(self.group.size):
            block = sent.block(member, (batch, local_rows, num_heads, head_dim))
            start = min(member * slices.length, num_real)
            count = min(slices.length, num_real - start)
            end = slices.num_prefix + count
            block[:, : slices.num_prefix] = rows(out, 0, slices.num_prefix)
            block[:, slices.num_prefix : end] = rows(out, slices.num_prefix + start, count)
            block[:, end : local_rows - slices.num_suffix] = 0.0
            block[:, local_rows - slices.num_suffix :] = rows(out, num_rows - slices.num_suffix, slices.num_suffix)
        return start_all_to_all(sent, received)


def _tensors_of(inputs: AttentionInputs, share: HeadShare) -> list[torch.Tensor]:
    """q, k, v and the gate if there is one, with the heads of `share`."""
    heads = slice(share.start, share.stop)
    tensors = [inputs.q[:, :, heads], share.take_kv(inputs.k), share.take_kv(inputs.v)]
    return tensors if inputs.gate is None else [*tensors, inputs.gate[:, :, heads]]


def _num_rows_of_heads(share: HeadShare, has_gate: bool) -> int:
    """Heads of q, k, v and gate that are sent together, per token."""
    return share.num_heads * (2 if has_gate else 1) + 2 * share.num_kv_heads
