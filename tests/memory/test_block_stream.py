"""Streamed blocks: what is copied when, into which slot, and what is left after a failure; on a stand-in device."""

from __future__ import annotations

import gc

import pytest
import torch
from offloaded_pipelines import StrictTransfers
from torch import nn

from diffusion_runtime.memory.offloaded_part import OffloadedPart, into_arena
from diffusion_runtime.memory.waiting_weights import held_weights

DIM = 4


class Cross(nn.Module):
    """Weights that another call reads than the block's."""

    read_once = ("key",)

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(DIM, 2)


class Block(nn.Module):
    """x + w x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.cross = Cross()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return x + out


class Stack(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.register_buffer("table", torch.ones(DIM), persistent=False)

    def forward(self, x: torch.Tensor, skipped: frozenset[int] = frozenset()) -> torch.Tensor:
        x = self.first(x) * self.table
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = block(x)
        return x


class Offloaded:
    """A stack, a copy of it that is offloaded, and its transfers."""

    def __init__(self, num_blocks: int, num_resident: int | None, *, pins: bool = True) -> None:
        torch.manual_seed(0)
        self.plain, self.stack = Stack(num_blocks), Stack(num_blocks)
        self.stack.load_state_dict(self.plain.state_dict())
        self.stack.requires_grad_(False)
        self.transfers = StrictTransfers(refuses_pins=not pins)
        arena = into_arena(self.stack)
        self.is_pinned = (arena.pin(self.transfers.register, self.transfers.unregister), arena.is_pinned)[1]
        self.transfers.hide(arena.bytes)
        self.part = OffloadedPart("stack", self.stack, arena, self.transfers, num_resident)

    @property
    def num_copies(self) -> tuple[int, int]:
        """Of blocks: all, and late ones."""
        assert self.part.stream is not None
        return self.part.stream.num_copies, self.part.stream.num_late_copies


X = torch.arange(8.0).view(2, DIM)


@torch.no_grad()
@pytest.mark.parametrize("num_resident", [None, 0, 1, 4, 5, 9])
@pytest.mark.parametrize("num_blocks", [2, 5])
def test_what_is_streamed_computes_what_is_resident_does(num_blocks: int, num_resident: int | None) -> None:
    each = Offloaded(num_blocks, num_resident)
    each.part.enter()
    for _ in range(3):
        assert torch.equal(each.stack(X), each.plain(X))
    is_streamed = num_resident is not None and num_resident < num_blocks
    assert (each.part.stream is not None) == is_streamed
    each.part.leave()
    # Its weights are those of the machine, which the stand-in hides.
    assert bool(each.stack(X).isnan().all())
    each.part.enter()
    assert torch.equal(each.stack(X), each.plain(X))


@torch.no_grad()
def test_blocks_are_copied_ahead_each_once_a_pass() -> None:
    each = Offloaded(6, 0)
    each.part.enter()
    for passes in range(1, 4):
        each.stack(X)
        # Two ahead when it begins, and the first two of the next pass when it ends.
        assert each.num_copies == (2 + 6 * passes, 0)


@torch.no_grad()
def test_blocks_that_a_step_cache_leaves_out_cost_a_copy_and_nothing_else() -> None:
    each = Offloaded(6, 0)
    each.part.enter()
    for skipped in (frozenset({2, 3, 4}), frozenset(range(6)), frozenset({0}), frozenset[int]()):
        assert torch.equal(each.stack(X, skipped), each.plain(X, skipped))
    assert 0 < each.num_copies[1] <= 4


@torch.no_grad()
def test_weights_outside_of_a_forward_are_there_while_they_are_held_and_not_else() -> None:
    each = Offloaded(5, 1)
    each.part.enter()
    for ours, plain in zip(each.stack.blocks, each.plain.blocks, strict=True):
        assert isinstance(ours, Block)
        assert isinstance(plain, Block)
        with held_weights(ours.cross):
            assert torch.equal(ours.cross.key(X), plain.cross.key(X))
        assert bool(ours.cross.key(X).isnan().all())
        with held_weights(ours):
            assert torch.equal(ours.linear(X), plain.linear(X))
    second = each.stack.blocks[1]
    assert isinstance(second, Block)
    assert bool(second.linear(X).isnan().all())
    assert torch.equal(each.stack(X), each.plain(X))


@torch.no_grad()
def test_after_a_failure_in_a_block_or_a_copy_the_next_pass_is_right() -> None:
    each = Offloaded(5, 0)
    each.part.enter()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = each.stack.blocks[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        each.stack(X)
    handle.remove()
    assert torch.equal(each.stack(X), each.plain(X))
    each.transfers.fails_at = each.transfers.num_copies + 3
    with pytest.raises(KeyboardInterrupt):
        each.stack(X)
    each.transfers.fails_at = None
    assert torch.equal(each.stack(X), each.plain(X))
    each.part.leave()
    each.part.enter()
    assert torch.equal(each.stack(X), each.plain(X))


@torch.no_grad()
def test_memory_on_the_device_is_two_slots_the_blocks_that_stay_and_the_rest() -> None:
    block = 2 * 256
    for num_resident in (0, 2, 5):
        each = Offloaded(6, num_resident)
        # The first layer and its bias, and the table. One streamed block has one slot.
        rest = 3 * 256
        slots = min(2, 6 - num_resident)
        assert each.part.device_bytes == rest + (num_resident + slots) * block


def test_pinned_memory_is_given_back_by_close_or_with_the_arena() -> None:
    each = Offloaded(3, 0)
    assert each.is_pinned
    assert len(each.transfers.pins) == 1
    each.part.close()
    assert each.transfers.pins == {}
    other = Offloaded(3, 0)
    transfers = other.transfers
    assert transfers.pins
    del other
    gc.collect()
    assert transfers.pins == {}


@torch.no_grad()
def test_where_pinning_is_refused_a_line_says_so_and_everything_runs(caplog: pytest.LogCaptureFixture) -> None:
    each = Offloaded(3, 0, pins=False)
    assert not each.is_pinned
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not pinned, and copies to the device take longer: the system says no" in line
    each.part.enter()
    assert torch.equal(each.stack(X), each.plain(X))
