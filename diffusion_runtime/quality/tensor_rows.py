"""Dataclasses of tensors that share their first dimension."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import Self


class TensorRows:
    """Base of dataclasses whose fields are tensors [rows, ...]."""

    def __len__(self) -> int:
        return len(next(iter(self._tensors().values())))

    def select(self, rows: slice | Tensor) -> Self:
        """Return these rows."""
        return type(self)(**{name: tensor[rows] for name, tensor in self._tensors().items()})

    def to(self, device: torch.device | str) -> Self:
        """Return the same rows on another device."""
        return type(self)(**{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        declared: Any = self
        return {field.name: getattr(self, field.name) for field in fields(declared)}
