"""Stored format: 8-bit integers with one scale per tensor or row, rotated in groups (int8 ConvRot) or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.int8_rows.reference import GROUP_SIZES, dequantize
from diffusion_runtime.layers.eight_bit_linear import EightBits
from diffusion_runtime.layers.int8_linear import Int8Linear
from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.weights.stored_formats.float8 import scale_of_rows, scales_by_row
from diffusion_runtime.weights.stored_formats.interface import Companion, Shape, StoredFormat, check_columns, setting
from diffusion_runtime.weights.tensor_files import TensorHead


@dataclass(frozen=True)
class Int8(StoredFormat):
    """rotated(numbers * scale of the row). group_size: numbers of a row that are rotated together, 0 for none."""

    names = ("int8_tensorwise",)
    kinds = ("I8",)
    described = "int8 weights"
    rotates = True

    group_size: int = 0

    @classmethod
    def read(cls, settings: Mapping[str, object], beside: Mapping[str, TensorHead]) -> Int8:  # noqa: ARG003
        rotates = settings.get("convrot", False)
        if not isinstance(rotates, bool):
            raise ModelLoadError(f"convrot: expected true or false, got {shown(rotates)}")
        return cls(setting(settings, "convrot_groupsize", GROUP_SIZES[-1], GROUP_SIZES) if rotates else 0)

    @property
    def title(self) -> str:
        return f"int8 ConvRot {self.group_size}" if self.group_size else "int8"

    @property
    def eight_bits(self) -> EightBits:
        return EightBits(Int8Linear, self.group_size)

    def shape(self, stored: Shape) -> Shape:
        # Weights of convolutions are not rotated, and have a scale per output channel.
        return check_columns(stored, 1, self.group_size or 1) if self.group_size or len(stored) < 3 else stored

    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        return (scale_of_rows(stored[0]),)

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        return StoredTensor(torch.int8, (num_rows, num_columns)), StoredTensor(torch.float32, (num_rows, 1))

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        return weight.flatten(1), scales_by_row(beside, rows, num_rows)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return dequantize(self.quantized_rows(tensors), self.group_size, torch.float32)

    def quantized_rows(self, tensors: Sequence[torch.Tensor]) -> QuantizedRows:
        return QuantizedRows(*tensors)
