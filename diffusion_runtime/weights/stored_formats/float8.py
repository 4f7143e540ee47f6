"""Stored format: 8-bit floats, a plain cast or with one scale per tensor or row (ComfyUI's fp8_scaled, ModelOpt)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows, dequantize
from diffusion_runtime.layers.eight_bit_linear import EightBits
from diffusion_runtime.layers.fp8_linear import Fp8Linear
from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.weights.stored_formats.interface import FLOATS, Companion, Shape, StoredFormat

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def scale_of_rows(num_rows: int, *, aliases: tuple[str, ...] = (), is_required: bool = True) -> Companion:
    """Return the scale beside a weight: one number, or one per row."""
    shapes = ((), (1,), (1, 1), (num_rows,), (num_rows, 1))
    return Companion("weight_scale", FLOATS, shapes, aliases=aliases, is_required=is_required)


def scales_by_row(beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int) -> torch.Tensor:
    """Return the scales of some rows, float32 [rows, 1]; 1 where there are none."""
    scales = beside.get("weight_scale", torch.ones(())).float().reshape(-1, 1).expand(num_rows, 1)
    return (scales if rows is None else scales[rows]).clone()


@dataclass(frozen=True)
class Float8(StoredFormat):
    """numbers * scale of the row."""

    names = ("float8_e4m3fn", "float8_e5m2")
    kinds = tuple(FLOAT8)
    described = "8-bit floats"

    @property
    def title(self) -> str:
        return "8-bit floats"

    @property
    def eight_bits(self) -> EightBits:
        return EightBits(Fp8Linear)

    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        return (scale_of_rows(stored[0] if stored else 1, aliases=("scale_weight",), is_required=False),)

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor(torch.float8_e4m3fn, (num_rows, num_columns)),
            StoredTensor(torch.float32, (num_rows, 1)),
        )

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """Return [rows, numbers per row] and scales."""
        values = weight.reshape(weight.shape[0] if weight.dim() else 1, -1)
        wrong = unusable_numbers(values)
        if wrong is not None:
            raise ModelLoadError(wrong)
        return values, scales_by_row(beside, rows, num_rows)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return dequantize(self.quantized_rows(tensors), torch.float32)

    def quantized_rows(self, tensors: Sequence[torch.Tensor]) -> QuantizedRows:
        return QuantizedRows(*tensors)
