"""Tensor parallel: what of a layer's weight one process holds, and the collective behind its product (Shoeybi et al.,
arXiv:1909.08053, section 3).

A column-parallel layer makes a part of the features, such as those of some heads; a row-parallel layer takes a part of
the features, and the sum over the processes (all-reduce) is the product. The two follow each other, so that there is
one sum for attention and one for the feed-forward network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.collectives import RankGroup, gather_features, sum_in_place

# column: a part of the output features; gathered: the same, and every process receives the others'; row: a part of the
# input features; norm: of a norm over features that a column-parallel layer makes, whose squares are summed.
ShareKind: TypeAlias = Literal["column", "gathered", "row", "norm"]


@dataclass(frozen=True)
class WeightShare:
    """One process's part of a weight: of every section the one of group.size equal parts that is group.index's.

    sections: widths of what lies side by side in the features that are divided, such as q, k and v.
    """

    kind: ShareKind
    sections: tuple[int, ...]
    group: RankGroup

    @property
    def num_features(self) -> int:
        """Number of divided features that this process holds."""
        return sum(self.sections) // self.group.size

    @property
    def num_features_total(self) -> int:
        return sum(self.sections)

    @property
    def ranges(self) -> tuple[slice, ...]:
        """Which they are, in the order in which this process holds them."""
        found, first = [], 0
        for section in self.sections:
            length = section // self.group.size
            start = first + self.group.index * length
            found.append(slice(start, start + length))
            first += section
        return tuple(found)

    @property
    def adds_bias(self) -> bool:
        """True if this process adds the bias: of a sum over processes only the first, so that it counts once."""
        return self.kind != "row" or self.group.index == 0

    def check(self, name: str, num_features: int) -> None:
        """Raises ConfigError where the sections do not make up the layer's features, or cannot be divided evenly. name:
        of the layer."""
        if self.num_features_total != num_features:
            raise ConfigError(f"{name}: sections {self.sections} do not make up its {num_features} features")
        for section in self.sections:
            if section % self.group.size:
                fitting = ", ".join(str(size) for size in range(1, 65) if section % size == 0)
                raise ConfigError(
                    f"parallel.tensor_parallel_size: {self.group.size} processes cannot share the {section} features "
                    f"of {name} evenly; degrees that divide them: {fitting}"
                )

    def complete(self, product: torch.Tensor) -> torch.Tensor:
        """Return the layer's result from this process's product [..., features], which may be overwritten; of a norm,
        the sum of its squares."""
        if self.kind == "column":
            return product
        if self.kind == "gathered":
            return gather_features(self.group, product)
        return sum_in_place(self.group, product)
