"""Linear layers whose weights stay as their file stores them, and are dequantised per call: storage alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.layers.eight_bit_linear import ProductCounter
from diffusion_runtime.layers.linear import Linear

# Where a tensor begins within a weight's bytes: a multiple of every dtype's size.
_ALIGNMENT = 16


class StorageFormat(Protocol):
    """Format of stored tensors, which makes numbers of them: a value (weights/stored_formats)."""

    @property
    def title(self) -> str:
        """Name in reports, such as `NVFP4` or `GGUF Q4_K`."""

    @property
    def kind(self) -> str:
        """Name of all such weights together, such as `GGUF blocks`; empty for plain numbers."""

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return float32 [rows, numbers per row] of the tensors of a weight, those by row first."""


class StoredTensor(NamedTuple):
    """Head of a tensor of a stored weight. by_row: whether its first dimension counts the weight's rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    by_row: bool = True

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredPart(NamedTuple):
    """Rows of a weight as they lie in its bytes: their tensors one after the other, each aligned."""

    format: StorageFormat
    num_rows: int
    tensors: tuple[StoredTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(each.num_bytes) for each in self.tensors)

    def views(self, data: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensors in this part's bytes, uint8 [bytes]."""
        start = 0
        for each in self.tensors:
            yield data[start : start + each.num_bytes].view(each.dtype).view(each.shape)
            start += _aligned(each.num_bytes)


class PackedRows(NamedTuple):
    """Rows of a weight as they are stored. tensors: those by row, [rows, ...], and behind them those of all rows."""

    format: StorageFormat
    tensors: tuple[torch.Tensor, ...]
    num_by_row: int = 1

    @property
    def part(self) -> StoredPart:
        heads = [StoredTensor(x.dtype, tuple(x.shape), place < self.num_by_row) for place, x in enumerate(self.tensors)]
        return StoredPart(self.format, self.tensors[0].shape[0], tuple(heads))

    def numbers(self) -> torch.Tensor:
        return self.format.numbers(self.tensors)

    def some(self, rows: slice | torch.Tensor) -> PackedRows:
        """Return some of the rows, or all in another order."""
        chosen = [x[rows] if place < self.num_by_row else x for place, x in enumerate(self.tensors)]
        return self._replace(tensors=tuple(chosen))


class StoredLinear(Linear):
    """x @ weight.T + bias. weight: the bytes of all rows, uint8 [bytes]; rows may be in several formats, one after the
    other: a file may have q, k and v in different ones. bias: in the model's dtype."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, counter: ProductCounter) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=self.weight.device), requires_grad=False)
        self._counter = counter
        self._parts: tuple[StoredPart, ...] = ()

    def expect(self, parts: Sequence[StoredPart]) -> None:
        """Take the bytes that the weight of an empty layer will have, all of it."""
        self._arrange(parts)
        data = self.weight.new_empty(sum(part.num_bytes for part in parts))
        self.weight = nn.Parameter(data, requires_grad=False)

    def pack(self, rows: Sequence[PackedRows], make_empty: Callable[[torch.Size], torch.Tensor]) -> torch.Tensor:
        """Take the formats of these rows, which are all of the weight, and return their bytes, uint8 [bytes]. The
        parameter is the caller's to set. make_empty: makes the tensor for them, of uint8."""
        self._arrange([each.part for each in rows])
        data = make_empty(torch.Size([sum(part.num_bytes for part in self._parts)]))
        # What lies between the tensors goes into fingerprints, too.
        data.zero_()
        for each, part, place in zip(rows, self._parts, self._places(data), strict=True):
            for target, values in zip(part.views(place), each.tensors, strict=True):
                target.copy_(values)
        return data

    def hold(self, rows: Sequence[PackedRows], device: torch.device) -> None:
        """Take these as the weight, all of it."""
        data = self.pack(rows, lambda shape: torch.empty(shape, dtype=torch.uint8, device=device))
        self.weight = nn.Parameter(data, requires_grad=False)

    def _arrange(self, parts: Sequence[StoredPart]) -> None:
        assert sum(part.num_rows for part in parts) == self.out_features
        self._parts = tuple(parts)

    def _places(self, data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(data, [part.num_bytes for part in self._parts])

    @property
    def layout(self) -> tuple[StoredPart, ...]:
        """Layout of the weight's bytes, from the first on."""
        return self._parts

    @property
    def formats(self) -> str:
        """`GGUF Q4_K`, or `NVFP4 and BF16`."""
        return " and ".join(dict.fromkeys(part.format.title for part in self._parts))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of its formats, such as `GGUF blocks`; empty before they are known."""
        return tuple(dict.fromkeys(part.format.kind for part in self._parts if part.format.kind))

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, [out_features, in_features]."""
        places = zip(self._parts, self._places(self.weight), strict=True)
        several = [part.format.numbers(tuple(part.views(data))).to(dtype) for part, data in places]
        return several[0] if len(several) == 1 else torch.cat(several)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype."""
        self._counter.count(f"weights dequantised per call: {self.formats}")
        return F.linear(x, self.numbers(x.dtype), self.bias)

    def forward_gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.product(x), approximate="tanh")

    def runs_in_parts(self, x: torch.Tensor) -> bool:  # noqa: ARG002 - of Linear
        """Return False: the weight's bytes are not rows of numbers."""
        return False

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.formats}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
