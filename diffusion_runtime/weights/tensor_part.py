"""Part of a tensor of a checkpoint: the rows or columns that one of several processes reads (tensor parallel)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

# Ascending and without overlap.
Ranges: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True)
class TensorPart:
    """rows, columns: of the first and the second dimension, None for all. is_zero: zeros in place of the tensor, which
    another process adds."""

    rows: Ranges | None = None
    columns: Ranges | None = None
    is_zero: bool = False

    @property
    def is_whole(self) -> bool:
        return self.rows is None and self.columns is None and not self.is_zero

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor of `shape`."""
        sizes = list(shape)
        for dimension, ranges in ((0, self.rows), (1, self.columns)):
            if ranges is not None:
                sizes[dimension] = sum(each.stop - each.start for each in ranges)
        return tuple(sizes)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a whole tensor."""
        if self.rows is not None:
            whole = torch.cat([whole[each] for each in self.rows])
        if self.columns is not None:
            whole = torch.cat([whole[:, each] for each in self.columns], dim=1)
        return torch.zeros_like(whole) if self.is_zero else whole


WHOLE = TensorPart()
