"""Stored format: AWQ: 4-bit integers with a scale and an offset per group of a row (Lin et al., arXiv:2306.00978)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.weights.stored_formats.interface import (
    FLOATS,
    NUMBERS,
    Companion,
    Shape,
    StoredFormat,
    check_columns,
    dtype_of,
    halves,
    setting,
)
from diffusion_runtime.weights.tensor_files import TensorHead

_GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class AwqW4A16(StoredFormat):
    """(number - 8) * scale + offset, of the group. group_size: numbers of a row that share both; dtype: of both."""

    names = ("awq_w4a16", "awq")
    kinds = ("I8", "U8")
    described = "4-bit AWQ weights"

    group_size: int = 64
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def read(cls, settings: Mapping[str, object], beside: Mapping[str, TensorHead]) -> AwqW4A16:
        return cls(setting(settings, "group_size", cls.group_size, _GROUP_SIZES), dtype_of(beside, "weight_scale"))

    @property
    def title(self) -> str:
        return "4-bit AWQ"

    def shape(self, stored: Shape) -> Shape:
        return check_columns(stored, 2, self.group_size)

    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        num_rows, num_columns = self.shape(stored)
        shapes = ((num_columns // self.group_size, num_rows),)
        return tuple(Companion(suffix, FLOATS, shapes, NUMBERS) for suffix in ("weight_scale", "weight_zeros"))

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        of_groups = StoredTensor(self.dtype, (num_rows, num_columns // self.group_size))
        return StoredTensor(torch.uint8, (num_rows, num_columns // 2)), of_groups, of_groups

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """Return numbers, scales and offsets of groups."""
        del num_rows
        chosen = slice(None) if rows is None else rows
        scales, offsets = (beside[suffix].to(self.dtype).t()[chosen] for suffix in ("weight_scale", "weight_zeros"))
        return weight.view(torch.uint8), scales, offsets

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        packed, scales, offsets = tensors
        numbers = halves(packed, high_first=False).float().view(*scales.shape, self.group_size)
        return ((numbers - 8) * scales.float()[..., None] + offsets.float()[..., None]).flatten(1)
