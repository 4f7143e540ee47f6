"""StoredFormat: the format of a weight in a file: which tensors stand beside it, and what makes numbers of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.layers.eight_bit_linear import EightBits
from diffusion_runtime.layers.stored_linear import StoredTensor
from diffusion_runtime.weights.tensor_files import TensorHead

Shape = tuple[int, ...]
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
FLOATS = tuple(FLOAT_DTYPES)
# What a stored scale may be, and how messages call it.
NUMBERS, POSITIVE, NOT_NEGATIVE = "numbers", "positive numbers", "numbers of at least 0"
_FITS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    NUMBERS: lambda x: torch.isfinite(x),
    POSITIVE: lambda x: torch.isfinite(x) & (x > 0),
    NOT_NEGATIVE: lambda x: torch.isfinite(x) & (x >= 0) & ~torch.signbit(x),
}


@dataclass(frozen=True)
class Companion:
    """A tensor beside a weight. suffix: of its name, in place of `weight`. kinds: how its numbers may be stored;
    shapes: those it may have; holds: which numbers; aliases: other suffixes."""

    suffix: str
    kinds: tuple[str, ...]
    shapes: tuple[Shape, ...]
    holds: str = POSITIVE
    aliases: tuple[str, ...] = ()
    is_required: bool = True

    def refusal(self, kind: str, shape: Shape) -> str | None:
        """Return why the head of a tensor does not fit; None where it does."""
        if kind in self.kinds and shape in self.shapes:
            return None
        shapes = " or ".join(str(list(each)) for each in dict.fromkeys(self.shapes))
        return f"is {kind} {list(shape)}; expected {' or '.join(self.kinds)} {shapes}"

    def wrong_number(self, values: torch.Tensor) -> str | None:
        """Return the first number that nothing can be computed with; None where all are as they have to be."""
        wrong = ~_FITS[self.holds](values)
        return f"holds {float(values[wrong][0]):g}; expected {self.holds}" if bool(wrong.any()) else None


@dataclass(frozen=True)
class StoredFormat(ABC):
    """Format that a weight is stored in: a value. names: in `format` of ComfyUI's marks. kinds: how its numbers may be
    stored; described: all such weights together, as of StorageFormat.kind. rotates: whether rows may be rotated."""

    names: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[tuple[str, ...]] = ()
    described: ClassVar[str]
    rotates: ClassVar[bool] = False

    @classmethod
    def read(cls, settings: Mapping[str, object], beside: Mapping[str, TensorHead]) -> Self:
        """Return the format that a mark describes. beside: the tensors beside the weight, by suffix. Raises
        ModelLoadError, without the place, for settings that are not supported."""
        del settings, beside
        return cls()

    @property
    @abstractmethod
    def title(self) -> str: ...

    @property
    def kind(self) -> str:
        return self.described

    @property
    def eight_bits(self) -> EightBits | None:
        """The layers that hold such weights as they are and multiply in 8 bits; None where there are none."""
        return None

    def shape(self, stored: Shape) -> Shape:
        """Return the weight's shape. Raises ModelLoadError, without the place, for one that it cannot be stored in."""
        return stored

    @abstractmethod
    def companions(self, stored: Shape) -> tuple[Companion, ...]:
        """Return the tensors beside a weight that is stored in this shape."""

    @abstractmethod
    def heads(self, num_rows: int, num_columns: int) -> tuple[StoredTensor, ...]:
        """Return the heads of what `tensors` makes of so many rows."""

    @abstractmethod
    def tensors(
        self, weight: torch.Tensor, beside: Mapping[str, torch.Tensor], rows: slice | None, num_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors of some rows: those by row, [rows, ...], and behind them those of all rows.

        weight: these rows as they are stored. beside: companions by suffix, of the whole weight, which has num_rows
        rows. Raises ModelLoadError, without the place, for numbers that nothing can be computed with.
        """

    @abstractmethod
    def numbers(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return float32 [rows, columns]."""

    def quantized_rows(self, tensors: Sequence[torch.Tensor]) -> QuantizedRows:
        """Return rows as the layers of `eight_bits` hold them."""
        raise NotImplementedError(self.title)


def dtype_of(beside: Mapping[str, TensorHead], suffix: str) -> torch.dtype:
    """Return the dtype of a tensor beside a weight; bfloat16 where it is missing, which is refused later."""
    return FLOAT_DTYPES.get(beside[suffix].kind, torch.bfloat16) if suffix in beside else torch.bfloat16


def setting(settings: Mapping[str, object], key: str, default: int, choices: Sequence[int]) -> int:
    """Return a whole number of a mark. Raises ModelLoadError for one that is not among the choices."""
    value = settings.get(key, default)
    if type(value) is not int or value not in choices:
        raise ModelLoadError(f"{key}: expected {' or '.join(map(str, choices))}, got {shown(value)}")
    return value


def check_columns(stored: Shape, factor: int, multiple: int) -> Shape:
    """Return the shape of a weight of which `factor` numbers share an element. Raises ModelLoadError for one that is no
    matrix, or whose rows are no whole groups of `multiple` numbers."""
    if len(stored) != 2 or not all(stored) or stored[1] * factor % multiple:
        raise ModelLoadError(
            f"expected a matrix with rows of a multiple of {multiple} numbers, {factor} per element, got {list(stored)}"
        )
    return stored[0], stored[1] * factor


def halves(packed: torch.Tensor, *, high_first: bool) -> torch.Tensor:
    """Return uint8 [rows, 2 n] of two 4-bit numbers per element, of 8-bit [rows, n]."""
    data = packed.view(torch.uint8)
    pair = (data >> 4, data & 0x0F) if high_first else (data & 0x0F, data >> 4)
    return torch.stack(pair, dim=-1).flatten(-2)


# Rows and columns of a tile in which cuBLAS wants the scales of blocks.
TILE_ROWS, TILE_COLUMNS = 128, 4


def tiled_shape(num_rows: int, num_columns: int) -> Shape:
    """Return the shape in which scales of blocks are stored: whole tiles."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS, -(-num_columns // TILE_COLUMNS) * TILE_COLUMNS


def untiled(scales: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Return scales [num_rows, num_columns] of cuBLAS's tiles of 128 x 4: row r + 32 q of a tile is stored in row r, at
    4 q. The tiles of a row of tiles lie one after the other."""
    tile_rows, tile_columns = (
        size // tile for size, tile in zip(tiled_shape(num_rows, num_columns), (128, 4), strict=True)
    )
    tiles = scales.reshape(tile_rows, tile_columns, 32, 4, TILE_COLUMNS)
    rows = tiles.permute(0, 3, 2, 1, 4).reshape(tile_rows * TILE_ROWS, tile_columns * TILE_COLUMNS)
    return rows[:num_rows, :num_columns]
