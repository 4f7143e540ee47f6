"""Stored format: blocks of GGUF files, with their scales among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.kernels.gguf_blocks import block_scales, dequantize_blocks
from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.untrusted.gguf_header import num_bytes_of
from diffusion_runtime.weights.stored_formats.interface import Companion, Shape, StoredFormat


@dataclass(frozen=True)
class GgufBlocks(StoredFormat):
    """blocks: their kind, a name of kernels/gguf_blocks.py."""

    described = "GGUF blocks"

    blocks: str

    @property
    def title(self) -> str:
        return f"GGUF {self.blocks}"

    def companions(self, stored: Shape) -> tuple[Companion, ...]:  # noqa: ARG002
        return ()

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        num_bytes = num_bytes_of(self.blocks, num_rows * num_columns)
        return (StoredTensor(torch.uint8, (num_rows, num_bytes // max(1, num_rows))),)

    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        del beside, rows, num_rows
        wrong = unusable_numbers(block_scales(weight, self.blocks))
        if wrong is not None:
            raise ModelLoadError(wrong)
        return (weight,)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return dequantize_blocks(tensors[0], self.blocks)
