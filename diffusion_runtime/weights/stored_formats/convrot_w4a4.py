"""Stored format: 4-bit integers with one scale per row, rotated in groups (ConvRot W4A4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.kernels.int8_rows.reference import GROUP_SIZES, rotate
from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.weights.stored_formats.float8 import scale_of_rows, scales_by_row
from diffusion_runtime.weights.stored_formats.interface import (
    Companion,
    Shape,
    StoredFormat,
    check_columns,
    halves,
    setting,
)
from diffusion_runtime.weights.tensor_files import TensorHead


def signed(packed: torch.Tensor) -> torch.Tensor:
    """Return int8 [rows, 2 n] in -8 to 7 of two's complements in 4 bits, the first of two in the lower half."""
    numbers = halves(packed, high_first=False).view(torch.int8)
    return numbers - ((numbers & 8) << 1)


@dataclass(frozen=True)
class ConvRotW4A4(StoredFormat):
    """rotated(numbers * scale of the row). group_size: numbers of a row that are rotated together."""

    names = ("convrot_w4a4",)
    kinds = ("I8", "U8")
    described = "4-bit ConvRot weights"
    rotates = True

    group_size: int = GROUP_SIZES[-1]

    @classmethod
    def read(cls, settings: Mapping[str, object], beside: Mapping[str, TensorHead]) -> ConvRotW4A4:  # noqa: ARG003
        return cls(setting(settings, "convrot_groupsize", GROUP_SIZES[-1], GROUP_SIZES))

    @property
    def title(self) -> str:
        return f"4-bit ConvRot {self.group_size}"

    def shape(self, stored: Shape) -> Shape:
        return check_columns(stored, 2, self.group_size)

    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        return (scale_of_rows(stored[0]),)

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        return StoredTensor(torch.uint8, (num_rows, num_columns // 2)), StoredTensor(torch.float32, (num_rows, 1))

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        return weight.view(torch.uint8), scales_by_row(beside, rows, num_rows)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return rotate(signed(tensors[0]).float() * tensors[1], self.group_size)
