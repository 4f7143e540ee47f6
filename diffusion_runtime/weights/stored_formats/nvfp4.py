"""Stored format: NVFP4: 4-bit floats (E2M1), one 8-bit scale (E4M3) per 16 numbers, and one scale per tensor."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.weights.stored_formats.interface import (
    NOT_NEGATIVE,
    Companion,
    Shape,
    StoredFormat,
    check_columns,
    halves,
    tiled_shape,
    untiled,
)

_BLOCK = 16
# E2M1: a sign, two bits of exponent and one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))


@dataclass(frozen=True)
class Nvfp4(StoredFormat):
    """number * scale of its block * scale of the tensor. The first of two numbers is in the upper half of a byte."""

    names = ("nvfp4",)
    kinds = ("U8",)
    described = "NVFP4 weights"

    @property
    def title(self) -> str:
        return "NVFP4"

    def shape(self, stored: Shape) -> Shape:
        return check_columns(stored, 2, _BLOCK)

    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        num_rows, num_columns = self.shape(stored)
        return (
            Companion("weight_scale", ("F8_E4M3",), (tiled_shape(num_rows, num_columns // _BLOCK),), NOT_NEGATIVE),
            Companion("weight_scale_2", ("F32",), ((), (1,))),
        )

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor(torch.uint8, (num_rows, num_columns // 2)),
            StoredTensor(torch.float8_e4m3fn, (num_rows, num_columns // _BLOCK)),
            StoredTensor(torch.float32, (1,), by_row=False),
        )

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """Return numbers, the scales of blocks [rows, blocks], and the tensor's scale."""
        tiles = beside["weight_scale"].view(torch.uint8)
        scales = untiled(tiles, num_rows, 2 * weight.shape[1] // _BLOCK)
        own = (scales if rows is None else scales[rows]).contiguous().view(torch.float8_e4m3fn)
        return weight, own, beside["weight_scale_2"].view(1)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        packed, scales, scale = tensors
        values = _table(packed.device)[halves(packed, high_first=True).int()]
        of_blocks = (scales.float() * scale)[..., None]
        return (values.view(*scales.shape, _BLOCK) * of_blocks).flatten(1)


def _table(device: torch.device) -> torch.Tensor:
    """Return the number of every code; copied per call, from pinned memory, which a CUDA graph can hold."""
    is_pinned = device.type == "cuda"
    return _numbers(is_pinned).to(device, non_blocking=is_pinned)


@functools.cache
def _numbers(is_pinned: bool) -> torch.Tensor:
    numbers = torch.tensor(_NUMBERS, device="cpu")
    return numbers.pin_memory() if is_pinned else numbers
