"""Stored weights: a module whose weights wait in their files, and are read, with all conversions, when it needs them.

For machines whose memory holds a part of a model: what is read is what `load_weights` would have put there, bit for
bit, 8-bit rows, fused projections and LoRA files included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.eight_bit_linear import quantized_weights
from diffusion_runtime.memory.transfers import Transfers
from diffusion_runtime.memory.waiting_weights import let_wait
from diffusion_runtime.memory.weight_unit import aligned
from diffusion_runtime.weights.checkpoint import Checkpoint, Piece, WeightChange
from diffusion_runtime.weights.weight_loading import Arrange, MakeEmpty, check_parts, read_weights


@dataclass(frozen=True)
class Conversions:
    """The conversion of a component's tensors to parameters, as in load_weights. checkpoint: opens it with changes to
    it."""

    checkpoint: Callable[[Sequence[WeightChange]], Checkpoint]
    pieces: Mapping[str, tuple[Piece, ...]]
    device: torch.device
    dtype: torch.dtype
    stays_float32: Callable[[str], bool]
    arrange: Arrange | None


class StoredWeights:
    """The home of a module's weights (memory/weight_unit.py: WeightHome). Its parameters hold NaN while they wait, so
    that a read of one that is not there gives NaN (memory/waiting_weights.py).

    module: with empty parameters of the shapes and dtypes of loaded ones, and checked names. changes: made to the
    tensors as they are read, such as a LoRA. Keeps the files open, so that a folder that is replaced meanwhile changes
    nothing.
    """

    def __init__(self, module: nn.Module, conversions: Conversions, changes: Sequence[WeightChange]) -> None:
        self._module = module
        self._conversions = conversions
        self._checkpoint = self._opened(changes)
        let_wait(module)
        self._names = {id(tensor): name for name, tensor in module.state_dict(keep_vars=True).items()}

    def change(self, changes: Sequence[WeightChange]) -> None:
        """Other changes for what is read from now on. Raises what opening raises, and leaves everything as it was."""
        checkpoint = self._opened(changes)
        self.close()
        self._checkpoint = checkpoint

    def _opened(self, changes: Sequence[WeightChange]) -> Checkpoint:
        checkpoint = self._conversions.checkpoint(changes)
        try:
            check_parts(self._module, checkpoint, self._conversions.pieces)
        except ModelLoadError:
            checkpoint.close()
            raise
        # For a pipeline that is never closed.
        weakref.finalize(self, checkpoint.close)
        return checkpoint

    def unit(self, tensors: Sequence[torch.Tensor]) -> StoredUnit:
        """Return a unit, as WeightHome.unit does. What no file holds, such as rotary frequencies, stays where it is."""
        return StoredUnit(self, {self._names[id(each)]: each for each in tensors if id(each) in self._names})

    def read(self, names: Sequence[str], make_empty: MakeEmpty) -> dict[str, torch.Tensor]:
        """Return the values of some parameters. Raises ModelLoadError."""
        of, scales = self._conversions, set(quantized_weights(self._module).values())
        found = read_weights(
            self._module,
            self._checkpoint,
            of.pieces,
            of.device,
            of.dtype,
            of.stays_float32,
            of.arrange,
            make_empty,
            [name for name in names if name not in scales],
        )
        assert found.keys() == set(names), "an 8-bit weight and its scale come together"
        return found

    def expect(self, names: Sequence[str]) -> None:
        """These are read next."""
        scales = set(quantized_weights(self._module).values())
        pieces = [piece.name for name in names if name not in scales for piece in self._conversions.pieces[name]]
        self._checkpoint.expect(pieces)

    def pin(self, *_: Any) -> None:
        """Do nothing: there is nothing that WeightHome.pin could pin."""

    def close(self) -> None:
        """Close the files; nothing is read afterwards."""
        self._checkpoint.close()


class StoredUnit:
    """A Unit of a module whose weights are in their files. tensors: by name."""

    def __init__(self, home: StoredWeights, tensors: Mapping[str, torch.Tensor]) -> None:
        self._home = home
        self._tensors = dict(tensors)
        self._waiting = {name: tensor.detach() for name, tensor in tensors.items()}
        self._values: dict[str, torch.Tensor] = {}
        self.num_bytes = sum(aligned(tensor.nbytes) for tensor in tensors.values())

    def copy_to(self, buffer: torch.Tensor, transfers: Transfers) -> Any:
        """Read everything into the buffer and return when it is done; otherwise as Unit.copy_to."""
        used = 0

        def make_empty(shape: torch.Size, *, dtype: torch.dtype) -> torch.Tensor:
            nonlocal used
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            begin, used = used, used + aligned(num_bytes)
            return buffer[begin : begin + num_bytes].view(dtype).view(shape)

        # Outside of inference mode: tensors made in it could not be written to later.
        with torch.inference_mode(False):
            self._values = self._home.read(list(self._tensors), make_empty)
        return transfers.mark()

    def expect(self) -> None:
        """Expect the files' tensors next, as Unit.expect describes."""
        self._home.expect(list(self._tensors))

    def use_buffer(self, _: torch.Tensor) -> None:
        """Use the values that were read, as Unit.use_buffer describes."""
        for name, tensor in self._tensors.items():
            tensor.data = self._values[name]

    def use_host(self) -> None:
        """Use the waiting tensors and drop the values that were read, as Unit.use_host describes."""
        for name, tensor in self._tensors.items():
            tensor.data = self._waiting[name]
        self._values = {}
