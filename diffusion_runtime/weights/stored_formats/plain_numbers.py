"""Stored format: numbers as they are, of rows that a LoRA changes beside others that stay quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.layers.stored_linear import StoredTensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class PlainNumbers:
    """dtype: of the numbers."""

    dtype: torch.dtype

    @property
    def title(self) -> str:
        return _NAMES[self.dtype]

    @property
    def kind(self) -> str:
        return ""

    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        return (StoredTensor(self.dtype, (num_rows, num_columns)),)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0].float()
