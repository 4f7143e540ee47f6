"""Stored format: MXFP8: 8-bit floats (E4M3) and one power of two (E8M0) per 32 numbers (OCP Microscaling, 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.weights.stored_formats.interface import (
    NUMBERS,
    Companion,
    Shape,
    StoredFormat,
    check_columns,
    tiled_shape,
    untiled,
)

_BLOCK = 32
_BIAS, _NAN = 127, 255


@dataclass(frozen=True)
class Mxfp8(StoredFormat):
    """number * 2 ** (scale of its block - 127)."""

    names = ("mxfp8",)
    kinds = ("F8_E4M3",)
    described = "MXFP8 weights"

    @property
    def title(self) -> str:
        return "MXFP8"

    def shape(self, stored: Shape) -> Shape:
        return check_columns(stored, 1, _BLOCK)

    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        shape = tiled_shape(stored[0], stored[1] // _BLOCK)
        return (Companion("weight_scale", ("F8_E8M0", "U8"), (shape,), NUMBERS),)

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor(torch.float8_e4m3fn, (num_rows, num_columns)),
            StoredTensor(torch.uint8, (num_rows, num_columns // _BLOCK)),
        )

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """Return numbers and exponents [rows, blocks]."""
        wrong = unusable_numbers(weight)
        if wrong is not None:
            raise ModelLoadError(wrong)
        scales = untiled(beside["weight_scale"].view(torch.uint8), num_rows, weight.shape[1] // _BLOCK)
        if bool((scales == _NAN).any()):
            raise ModelLoadError("has a block whose scale is NaN")
        return weight, (scales if rows is None else scales[rows]).contiguous()

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        values, exponents = tensors
        # 255 is NaN, as of weights that wait (memory/waiting_weights.py).
        scales = torch.exp2(exponents.float() - _BIAS).masked_fill(exponents == _NAN, torch.nan)[..., None]
        return (values.float().view(*exponents.shape, _BLOCK) * scales).flatten(1)
