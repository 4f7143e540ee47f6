"""Block streaming: blocks of a model are copied to the device one after the other while others compute.

Two buffers on the device (slots) take turns. When a block has run, its slot is filled with the block after the next, on
a copy stream: the copy of one block has the time of another to hide in, and that of the resident blocks between them.
A block that is not the one expected, because a step cache left out those before it, is copied when it is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_runtime.memory.transfers import Transfers
from diffusion_runtime.memory.waiting_weights import set_hold
from diffusion_runtime.memory.weight_unit import Unit


@dataclass
class _Slot:
    """A buffer on the device. unit: which of the streamed ones is in it or on the way, copied: the event behind the
    copy."""

    buffer: torch.Tensor
    unit: int | None = None
    copied: Any = None


class BlockStream:
    """Streams the units of `blocks`, in their order and from the last to the first again.

    blocks: modules with their units. Between `start` and `stop` each of them has its weights on the device while it is
    called, and at no other time. num_copies: blocks copied so far; num_late_copies: those that a call waited for from
    their beginning.
    """

    def __init__(self, blocks: Sequence[tuple[nn.Module, Unit]], transfers: Transfers, num_slots: int) -> None:
        self._units = [unit for _, unit in blocks]
        self._transfers = transfers
        self._num_slots = min(num_slots, len(blocks))
        self._slot_bytes = max(unit.num_bytes for unit in self._units)
        self._slots: list[_Slot] = []
        self.num_copies = self.num_late_copies = 0
        self._blocks = [block for block, _ in blocks]
        self._hooks = []
        for index, block in enumerate(self._blocks):
            self._hooks += [
                block.register_forward_pre_hook(functools.partial(self._before, index)),
                block.register_forward_hook(functools.partial(self._behind, index), always_call=False),
            ]
            set_hold(block, functools.partial(self._held, index))

    @property
    def is_running(self) -> bool:
        return bool(self._slots)

    @property
    def num_blocks(self) -> int:
        return len(self._units)

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots."""
        return self._num_slots * self._slot_bytes

    def start(self) -> None:
        """Make the slots, and begin to fill them with the first blocks."""
        self._slots = [_Slot(self._transfers.empty(self._slot_bytes)) for _ in range(self._num_slots)]
        for index, slot in enumerate(self._slots):
            self._fill(slot, index)

    def stop(self) -> None:
        """Give the slots back; the blocks' tensors are those of the machine again."""
        for slot in self._slots:
            # The memory may be used again at once, by what computes: behind the copy into it.
            self._transfers.wait(slot.copied)
            self._empty(slot)
        self._slots = []

    def release(self) -> None:
        """`stop`, and let go of the blocks, for another arrangement of them."""
        self.stop()
        for hook in self._hooks:
            hook.remove()
        for block in self._blocks:
            set_hold(block, None)

    def _before(self, index: int, *_: object) -> None:
        if not self.is_running:
            return
        slot = self._slot_of(index)
        if slot is None:
            # The slot whose block comes last from here on.
            slot = max(self._slots, key=lambda each: self._distance(index, each.unit))
            self.num_late_copies += 1
            self._fill(slot, index)
        self._transfers.wait(slot.copied)
        self._units[index].use_buffer(slot.buffer)

    def _behind(self, index: int, *_: object) -> None:
        """Fill every slot whose block is not among the next ones."""
        if not self.is_running:
            return
        # Reading them now gives what is in the machine's memory, and not what is written into the slot.
        self._units[index].use_host()
        count = len(self._units)
        wanted = [(index + ahead) % count for ahead in range(1, self._num_slots + 1)]
        free = [slot for slot in self._slots if slot.unit not in wanted]
        for unit in wanted:
            if free and self._slot_of(unit) is None:
                self._fill(free.pop(0), unit)

    @contextlib.contextmanager
    def _held(self, index: int) -> Iterator[None]:
        self._before(index)
        try:
            yield
        finally:
            self._behind(index)

    def _fill(self, slot: _Slot, index: int) -> None:
        self._empty(slot)
        # Behind all that computes so far, which may read what is in the slot.
        slot.copied = self._units[index].copy_to(slot.buffer, self._transfers)
        slot.unit = index
        self.num_copies += 1
        self._units[(index + 1) % len(self._units)].expect()

    def _empty(self, slot: _Slot) -> None:
        if slot.unit is not None:
            self._units[slot.unit].use_host()
        slot.unit = None

    def _slot_of(self, index: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.unit == index), None)

    def _distance(self, index: int, unit: int | None) -> int:
        """Return how many blocks after `index` the slot's block comes."""
        return len(self._units) if unit is None else (unit - index) % len(self._units)
