"""Weight unit: tensors of a module that come to the device together, such as those of a block; the blocks of a model,
which are streamed one after the other, and how many bytes modules hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from diffusion_runtime.memory.transfers import Transfers

# Of a tensor within an arena and within a buffer of the device: what matrix products and bulk copies want, and more.
ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Unit(Protocol):
    """Tensors of a module that come to the device together. num_bytes: of a buffer that takes all of them."""

    num_bytes: int

    def copy_to(self, buffer: torch.Tensor, transfers: Transfers) -> Any:
        """Begin to bring the values into a buffer, behind all that computes so far; the event behind that."""

    def expect(self) -> None:
        """Announce that this unit is copied next, so that it may prefetch what takes no memory."""

    def use_buffer(self, buffer: torch.Tensor) -> None:
        """Let the module's tensors be those in a buffer on the device, which holds their values."""

    def use_host(self) -> None:
        """Point the module's tensors back to their home, where they stay while unused."""


class WeightHome(Protocol):
    """Store in which the weights of a part wait: an arena in the machine's memory, or their files."""

    def unit(self, tensors: Sequence[torch.Tensor]) -> Unit:
        """Parameters and buffers whose values wait here."""

    def pin(self, register: Callable[[int, int], str | None], unregister: Callable[[int], object]) -> None:
        """Pin the memory as HostArena.pin does; do nothing if there is none to pin."""

    def close(self) -> None:
        """Give back what it holds."""


class Arena(Protocol):
    """Arena as a WeightUnit uses it."""

    bytes: torch.Tensor

    def offset_of(self, tensor: torch.Tensor) -> int: ...


@dataclass(frozen=True)
class _Held:
    """tensor: a parameter or buffer; host: its values in the arena; place: where it begins in a buffer of the unit."""

    tensor: torch.Tensor
    host: torch.Tensor
    place: int


class WeightUnit:
    """A Unit. tensors: parameters and buffers whose values are in the arena.

    Tensors that lie side by side in the arena are one copy.
    """

    def __init__(self, arena: Arena, tensors: Sequence[torch.Tensor]) -> None:
        self._held: list[_Held] = []
        self._runs: list[tuple[int, int, int]] = []
        self.num_bytes = 0
        for tensor in sorted(tensors, key=arena.offset_of):
            begin, size = arena.offset_of(tensor), aligned(tensor.nbytes)
            self._held.append(_Held(tensor, tensor.detach(), self.num_bytes))
            if self._runs and self._runs[-1][0] + self._runs[-1][2] == begin:
                first, place, length = self._runs[-1]
                self._runs[-1] = (first, place, length + size)
            else:
                self._runs.append((begin, self.num_bytes, size))
            self.num_bytes += size
        self._arena = arena

    def copies_to(self, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) of each run of bytes."""
        return [
            (buffer[place : place + length], self._arena.bytes[begin : begin + length])
            for begin, place, length in self._runs
        ]

    def copy_to(self, buffer: torch.Tensor, transfers: Transfers) -> Any:
        return transfers.copy(self.copies_to(buffer), transfers.mark())

    def expect(self) -> None:
        """Do nothing: the arena is in memory."""

    def use_buffer(self, buffer: torch.Tensor) -> None:
        """Let the module's tensors be those in a buffer on the device."""
        for held in self._held:
            part = buffer[held.place : held.place + held.host.nbytes]
            held.tensor.data = part.view(held.host.dtype).view(held.host.shape)

    def use_host(self) -> None:
        """Let the module's tensors be those in the arena."""
        for held in self._held:
            held.tensor.data = held.host


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the module's parameters and buffers once each, in the order of its state dict; others come last."""
    order = [*module.state_dict(keep_vars=True).values(), *module.parameters(), *module.buffers()]
    return list({id(tensor): tensor for tensor in order}.values())


# A list of fewer modules than this is no stack of blocks: embeddings of two streams, heads of an output.
MIN_BLOCKS = 2


def num_bytes_of(module: nn.Module) -> int:
    """Bytes of its parameters and persistent buffers, each counted once; on the meta device those it would take."""
    return sum({id(tensor): tensor.nbytes for tensor in module.state_dict(keep_vars=True).values()}.values())


def blocks_of(root: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of its outermost ModuleLists of one class each, or of subclasses of one of them, in the order
    of declaration, which is the order they run in."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():
        if not isinstance(module, nn.ModuleList) or module in inside:
            continue
        elements = list(module)
        kinds = {type(each) for each in elements}
        is_stack = len(elements) >= MIN_BLOCKS and any(all(issubclass(each, kind) for each in kinds) for kind in kinds)
        if is_stack and any(True for _ in module.parameters()):
            found += elements
            inside.update(each for element in elements for each in element.modules())
    return tuple(found)


def read_once(block: nn.Module) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """Modules of a block with tensors of theirs that its forward does not read: what `read_once` of the module names,
    such as the projections of a text to keys and values. Code that reads them enters `held_weights`
    (memory/waiting_weights.py)."""
    found = []
    for module in block.modules():
        names: tuple[str, ...] = getattr(module, "read_once", ())
        tensors: list[torch.Tensor] = [tensor for name in names for tensor in module.get_submodule(name).parameters()]
        if tensors:
            found.append((module, tensors))
    return found


def largest_held_bytes(root: nn.Module) -> int:
    """Return the most bytes present at once of weights that are read outside of a forward of a module's blocks."""
    held = (tensors for block in blocks_of(root) for _, tensors in read_once(block))
    return max((sum(tensor.nbytes for tensor in tensors) for tensors in held), default=0)


def streamed_bytes(block: nn.Module) -> tuple[int, int]:
    """(bytes of a block that its forward reads, bytes that are read once a request)."""
    apart = sum(tensor.nbytes for _, tensors in read_once(block) for tensor in tensors)
    return num_bytes_of(block) - apart, apart
