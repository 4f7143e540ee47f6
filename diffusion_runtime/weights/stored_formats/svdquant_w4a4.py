"""Stored format: SVDQuant: 4-bit integers, a scale per 64 numbers, smoothed, and a product of low rank (Li et al.,
arXiv:2411.05007)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.weights.stored_formats.convrot_w4a4 import signed
from diffusion_runtime.weights.stored_formats.interface import (
    FLOATS,
    NUMBERS,
    Companion,
    Shape,
    StoredFormat,
    check_columns,
    dtype_of,
)
from diffusion_runtime.weights.tensor_files import TensorHead

_GROUP = 64


@dataclass(frozen=True)
class SvdQuantW4A4(StoredFormat):
    """number * scale of its group / smooth factor of its column + up @ down.T. rank: of that product; dtype: of all but
    the smooth factors."""

    names = ("svdquant_w4a4",)
    kinds = ("I8", "U8")
    described = "4-bit SVDQuant weights"

    rank: int = 0
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def read(cls, settings: Mapping[str, object], beside: Mapping[str, TensorHead]) -> SvdQuantW4A4:
        if settings.get("act_unsigned"):
            raise ModelLoadError(
                "act_unsigned: inputs of this layer are shifted before they are quantised, which weights that are "
                "dequantised cannot do; use a file without it, or in another format"
            )
        up = beside.get("weight_proj_up")
        if up is None:
            return cls()
        return cls(up.shape[-1] if up.shape else 0, dtype_of(beside, "weight_proj_up"))

    @property
    def title(self) -> str:
        return "4-bit SVDQuant"

    def shape(self, stored: Shape) -> Shape:
        return check_columns(stored, 2, _GROUP)

    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        num_rows, num_columns = self.shape(stored)
        return (
            Companion("weight_scale", FLOATS, ((num_columns // _GROUP, num_rows),), NUMBERS),
            Companion("weight_smooth_factor", FLOATS, ((num_columns,),)),
            Companion("weight_proj_up", FLOATS, ((num_rows, self.rank),), NUMBERS),
            Companion("weight_proj_down", FLOATS, ((num_columns, self.rank),), NUMBERS),
        )

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor(torch.uint8, (num_rows, num_columns // 2)),
            StoredTensor(self.dtype, (num_rows, num_columns // _GROUP)),
            StoredTensor(self.dtype, (num_rows, self.rank)),
            StoredTensor(self.dtype, (num_columns, self.rank), by_row=False),
            StoredTensor(torch.float32, (num_columns,), by_row=False),
        )

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """Return numbers, scales of groups, the halves of the product of low rank, and smooth factors."""
        del num_rows
        chosen = slice(None) if rows is None else rows
        scales, up = beside["weight_scale"].to(self.dtype).t()[chosen], beside["weight_proj_up"][chosen]
        smooth = beside["weight_smooth_factor"].float()
        return weight.view(torch.uint8), scales, up.to(self.dtype), beside["weight_proj_down"].to(self.dtype), smooth

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        packed, scales, up, down, smooth = tensors
        groups = signed(packed).float().view(*scales.shape, _GROUP) * scales.float()[..., None]
        return torch.addmm(groups.flatten(1) / smooth, up.float(), down.float().t())
