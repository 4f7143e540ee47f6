"""Offloaded part: a module whose weights wait in the machine's memory or in their files, and are on the device while it
is used."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from diffusion_runtime.memory.block_stream import BlockStream
from diffusion_runtime.memory.host_arena import HostArena
from diffusion_runtime.memory.plan import NUM_SLOTS, spread
from diffusion_runtime.memory.transfers import Transfers
from diffusion_runtime.memory.waiting_weights import set_hold
from diffusion_runtime.memory.weight_unit import Unit, WeightHome, aligned, blocks_of, read_once, tensors_of


class OffloadedPart:
    """A loaded module whose tensors wait in `home`: an arena (`into_arena`, or filled there), or their files.

    num_slots: buffers that its streamed blocks take turns in. blocks: what may be streamed, None for `blocks_of` the
    module. num_resident: how many of these stay on the device between `enter` and `leave`, evenly spread; None for all,
    which are then copied whole. The others are streamed (`BlockStream`), and what is read once a request alone is there
    while somebody holds it (`held_weights`).
    """

    def __init__(
        self,
        name: str,
        root: nn.Module,
        home: WeightHome,
        transfers: Transfers,
        num_resident: int | None = None,
        num_slots: int = NUM_SLOTS,
        blocks: Sequence[nn.Module] | None = None,
    ) -> None:
        self.name = name
        self.home = home
        self._root = root
        self._transfers = transfers
        self._num_slots = num_slots
        self._blocks = tuple(blocks_of(root) if blocks is None else blocks)
        self._buffers: list[torch.Tensor] = []
        self.stream: BlockStream | None = None
        self.arrange(num_resident)

    def arrange(self, num_resident: int | None) -> None:
        """`leave`, and keep so many blocks on the device from now on."""
        self.leave()
        if self.stream is not None:
            self.stream.release()
        home, root = self.home, self._root
        blocks = () if num_resident is None else self._blocks
        if num_resident is not None and num_resident >= len(blocks):
            blocks = ()
        resident = spread(num_resident or 0, len(blocks))
        seldom = [(module, home.unit(tensors)) for block in blocks for module, tensors in read_once(block)]
        self._apart = {id(tensor) for block in blocks for _, tensors in read_once(block) for tensor in tensors}
        for module, unit in seldom:
            set_hold(module, functools.partial(self._held, unit))
        streamed = [block for index, block in enumerate(blocks) if index not in resident]
        # What more than one block holds is no block's own.
        owners: dict[int, int] = {}
        for block in streamed:
            for tensor in self._own_tensors(block):
                owners[id(tensor)] = owners.get(id(tensor), 0) + 1
        units = [
            (block, home.unit([each for each in self._own_tensors(block) if owners[id(each)] == 1]))
            for block in streamed
        ]
        moved = {key for key, count in owners.items() if count == 1} | self._apart
        self._whole = home.unit([tensor for tensor in tensors_of(root) if id(tensor) not in moved])
        self.stream = BlockStream(units, self._transfers, self._num_slots) if units else None

    @property
    def num_blocks(self) -> int:
        """Number of blocks that may be streamed."""
        return len(self._blocks)

    @property
    def arena(self) -> HostArena:
        """The home of a part that waits in the machine's memory."""
        assert isinstance(self.home, HostArena)
        return self.home

    @property
    def is_on_device(self) -> bool:
        return bool(self._buffers)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on the device while the part is used."""
        return self._whole.num_bytes + (0 if self.stream is None else self.stream.device_bytes)

    def enter(self) -> None:
        """Bring its weights to the device, those that are streamed aside."""
        if self.is_on_device:
            return
        buffer = self._transfers.empty(self._whole.num_bytes)
        self._buffers.append(buffer)
        self._transfers.wait(self._whole.copy_to(buffer, self._transfers))
        self._whole.use_buffer(buffer)
        if self.stream is not None:
            self.stream.start()

    def leave(self) -> None:
        """Give the memory on the device back. The module's tensors are those of the machine again."""
        if self.stream is not None:
            self.stream.stop()
        if self.is_on_device:
            self._whole.use_host()
        self._buffers.clear()

    def close(self) -> None:
        """`leave`, and close the home: unlock the arena's pages."""
        self.leave()
        self.home.close()

    def _own_tensors(self, block: nn.Module) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_of(block) if id(tensor) not in self._apart]

    @contextlib.contextmanager
    def _held(self, unit: Unit) -> Iterator[None]:
        if not self.is_on_device:
            yield
            return
        buffer = self._transfers.empty(unit.num_bytes)
        self._transfers.wait(unit.copy_to(buffer, self._transfers))
        unit.use_buffer(buffer)
        try:
            yield
        finally:
            unit.use_host()


def arena_for(root: nn.Module) -> HostArena:
    """Room for all tensors of a module, which may be empty."""
    return HostArena(sum(aligned(tensor.nbytes) for tensor in tensors_of(root)))


@torch.no_grad()
def into_arena(root: nn.Module) -> HostArena:
    """Move the tensors of a loaded module into an arena, one after the other, so that few are there twice."""
    arena = arena_for(root)
    for tensor in tensors_of(root):
        place = arena.empty(tensor.shape, tensor.dtype)
        place.copy_(tensor)
        tensor.data = place
    return arena
