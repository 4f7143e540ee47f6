"""Weight unit: tensors of a module that are copied to the device together, such as those of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diffusion_runtime.memory.host_arena import HostArena, aligned


@dataclass(frozen=True)
class _Held:
    """tensor: a parameter or buffer; host: its values in the arena; place: where it begins in a buffer of the unit."""

    tensor: torch.Tensor
    host: torch.Tensor
    place: int


class WeightUnit:
    """tensors: parameters and buffers whose values are in the arena. num_bytes: of a buffer that takes all of them.

    Tensors that lie side by side in the arena are one copy.
    """

    def __init__(self, arena: HostArena, tensors: Sequence[torch.Tensor]) -> None:
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
    """Its parameters and buffers, each once, in the order of its state dict; what that leaves out comes last."""
    order = [*module.state_dict(keep_vars=True).values(), *module.parameters(), *module.buffers()]
    return list({id(tensor): tensor for tensor in order}.values())
