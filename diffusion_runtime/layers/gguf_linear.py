"""Linear layers whose weights stay as a GGUF file has them, and are dequantised per call: storage alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.kernels.gguf_blocks import dequantize_blocks
from diffusion_runtime.layers.fp8_linear import ProductCounter
from diffusion_runtime.layers.linear import Linear


class GgufRows(NamedTuple):
    """Rows of a weight. kind: a name of kernels/gguf_blocks.py; data: uint8 [rows, bytes]."""

    kind: str
    data: torch.Tensor


class GgufPart(NamedTuple):
    """Rows of a weight as they lie in its bytes. kind: as of GgufRows."""

    kind: str
    num_rows: int
    num_bytes: int


class GgufLinear(Linear):
    """x @ weight.T + bias. weight: the bytes of all rows, uint8 [bytes]; rows may be of several kinds, one after the
    other: a file may have q, k and v in different ones. bias: in the model's dtype."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, counter: ProductCounter) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=self.weight.device), requires_grad=False)
        self._counter = counter
        self._parts: tuple[GgufPart, ...] = ()

    def expect(self, parts: Sequence[GgufPart]) -> None:
        """Take the bytes that the weight of an empty layer will have, all of it."""
        self._arrange(parts)
        data = self.weight.new_empty(sum(part.num_bytes for part in parts))
        self.weight = nn.Parameter(data, requires_grad=False)

    def pack(self, rows: Sequence[GgufRows], make_empty: Callable[[torch.Size], torch.Tensor]) -> torch.Tensor:
        """Take the kinds of these rows, which are all of the weight, and return their bytes, uint8 [bytes]. The
        parameter is the caller's to set. make_empty: makes the tensor for them, of uint8."""
        self._arrange([GgufPart(each.kind, each.data.shape[0], each.data.numel()) for each in rows])
        data, start = make_empty(torch.Size([sum(part.num_bytes for part in self._parts)])), 0
        for each in rows:
            stop = start + each.data.numel()
            data[start:stop].copy_(each.data.flatten())
            start = stop
        return data

    def hold(self, rows: Sequence[GgufRows], device: torch.device) -> None:
        """Take these as the weight, all of it."""
        data = self.pack(rows, lambda shape: torch.empty(shape, dtype=torch.uint8, device=device))
        self.weight = nn.Parameter(data, requires_grad=False)

    def _arrange(self, parts: Sequence[GgufPart]) -> None:
        assert sum(part.num_rows for part in parts) == self.out_features
        self._parts = tuple(parts)

    @property
    def layout(self) -> tuple[GgufPart, ...]:
        """Layout of the weight's bytes, from the first on."""
        return self._parts

    @property
    def kinds(self) -> str:
        """`Q4_K`, or `Q4_K and Q6_K`."""
        return " and ".join(dict.fromkeys(part.kind for part in self._parts))

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, [out_features, in_features]."""
        sizes = [part.num_bytes for part in self._parts]
        several = [
            dequantize_blocks(data.view(part.num_rows, -1), part.kind).to(dtype)
            for part, data in zip(self._parts, torch.split(self.weight, sizes), strict=True)
        ]
        return several[0] if len(several) == 1 else torch.cat(several)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype."""
        self._counter.count(f"weights dequantised per call: GGUF {self.kinds}")
        return F.linear(x, self.numbers(x.dtype), self.bias)

    def forward_gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.product(x), approximate="tanh")

    def runs_in_parts(self, x: torch.Tensor) -> bool:  # noqa: ARG002 - of Linear
        """Return False: the weight's bytes are not rows of numbers."""
        return False

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, GGUF {self.kinds}"
