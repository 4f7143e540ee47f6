"""LoRA adapters, added to a weight: low rank, a whole difference, Kronecker and Hadamard products, and DoRA around any
of them; and weights that replace the model's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch


class Adapter(ABC):
    """A change of one matrix [rows, columns], computed in float32 on the CPU. rows, columns: of the whole matrix, which
    may hold several matrices of the checkpoint, one after the other."""

    rows: int
    columns: int

    @abstractmethod
    def delta(self, base: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return what is added to the rows `rows`, at strength 1. base: those rows without any LoRA, float32 [rows,
        columns]."""


@dataclass(frozen=True)
class LowRank(Adapter):
    """factor * up @ down (Hu et al., arXiv:2106.09685). down: [rank, columns]; up: [rows, rank]."""

    down: torch.Tensor
    up: torch.Tensor
    factor: float

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.up.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.down.shape[1]

    def delta(self, base: torch.Tensor, rows: slice) -> torch.Tensor:
        return self.up[rows].float() @ self.down.float() * self.factor


@dataclass(frozen=True)
class Difference(Adapter):
    """A difference that the file holds whole: of a weight, [rows, columns], or of a bias, [rows, 1]."""

    values: torch.Tensor
    factor: float = 1.0

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.values.shape[1]

    def delta(self, base: torch.Tensor, rows: slice) -> torch.Tensor:
        return self.values[rows].float() * self.factor


@dataclass(frozen=True)
class Replacement(Adapter):
    """Rows that the file holds whole, in place of a weight's, [rows, columns], or of a bias's, [rows, 1]. What other
    files add comes on top."""

    values: torch.Tensor

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.values.shape[1]

    def delta(self, base: torch.Tensor, rows: slice) -> torch.Tensor:
        return self.values[rows].float() - base


@dataclass(frozen=True)
class Factor:
    """One factor of a Kronecker or a Hadamard product: left [rows, columns], or the product of left [rows, rank] and
    right [rank, columns], which may be far larger than both and is computed when it is used."""

    left: torch.Tensor
    right: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.left.shape[0]

    @property
    def columns(self) -> int:
        return (self.left if self.right is None else self.right).shape[1]

    @property
    def rank(self) -> int | None:
        """Return the rank of the decomposition; None without one."""
        return None if self.right is None else self.right.shape[0]

    def matrix(self, rows: slice) -> torch.Tensor:
        """Return the given rows of the factor, float32."""
        left = self.left[rows].float()
        return left if self.right is None else left @ self.right.float()


@dataclass(frozen=True)
class TuckerFactor(Factor):
    """The kernel of a convolution by a Tucker decomposition: core [rank, rank, *kernel], left [rank, rows], right
    [rank, channels] (LyCORIS, arXiv:2309.14859). Its columns are the channels with the numbers of the kernel behind
    each."""

    core: torch.Tensor = field(kw_only=True)

    @property
    def rows(self) -> int:
        return self.left.shape[1]

    @property
    def columns(self) -> int:
        assert self.right is not None
        return self.right.shape[1] * self.core[0, 0].numel()

    @property
    def rank(self) -> int | None:
        return self.core.shape[0]

    def matrix(self, rows: slice) -> torch.Tensor:
        """Return these rows, rebuilt around the core, in float32."""
        assert self.right is not None
        core = self.core.float().flatten(2)
        product = torch.einsum("ijk,ip,jc->pck", core, self.left[:, rows].float(), self.right.float())
        return product.flatten(1)


@dataclass(frozen=True)
class Hadamard(Adapter):
    """LoHa: factor * first * second, number by number (Hyeon-Woo et al., FedPara, arXiv:2108.06098; Yeh et al.,
    LyCORIS, arXiv:2309.14859)."""

    first: Factor
    second: Factor
    factor: float

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.first.rows

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.first.columns

    def delta(self, base: torch.Tensor, rows: slice) -> torch.Tensor:
        return self.first.matrix(rows) * self.second.matrix(rows) * self.factor


@dataclass(frozen=True)
class Kronecker(Adapter):
    """LoKr: factor * kron(first, second) (Yeh et al., LyCORIS, arXiv:2309.14859)."""

    first: Factor
    second: Factor
    factor: float

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.first.rows * self.second.rows

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.first.columns * self.second.columns

    def delta(self, base: torch.Tensor, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(self.rows)
        height = self.second.rows
        # Only the rows of `first` that reach into the wanted ones.
        above, below = start // height, -(-stop // height)
        product = torch.kron(self.first.matrix(slice(above, below)), self.second.matrix(slice(None)))
        return product[start - above * height : stop - above * height] * self.factor


@dataclass(frozen=True)
class Decomposed(Adapter):
    """DoRA (Liu et al., arXiv:2402.09353): magnitude * (W + D) / |W + D| with D of `inner`; it adds that less W.

    magnitude: [rows, 1], with norms over each row, or [1, columns] with norms over each column.
    """

    inner: Adapter
    magnitude: torch.Tensor

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.inner.rows

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.inner.columns

    @property
    def by_row(self) -> bool:
        return self.magnitude.shape[1] == 1

    def delta(self, base: torch.Tensor, rows: slice) -> torch.Tensor:
        changed = base + self.inner.delta(base, rows)
        # In float64, since whole columns are summed: the result is to be exact to the last places of float32.
        norm = torch.linalg.vector_norm(changed, dim=1 if self.by_row else 0, keepdim=True, dtype=torch.float64).float()
        magnitude = self.magnitude[rows] if self.by_row else self.magnitude
        # A row of zeros has no direction; it stays 0.
        scale = torch.where(norm > 0, magnitude.float() / norm.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        return changed * scale - base
