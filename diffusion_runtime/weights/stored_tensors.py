"""Stored tensors: rows of a tensor in a file, with what makes numbers of them: its format, and tensors beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from diffusion_runtime.errors import ModelLoadError, shown_name
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.gguf_blocks import PLAIN_KINDS
from diffusion_runtime.layers.stored_linear import PackedRows, StoredPart
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.weights.layer_formats import LayerFormat, find_formats
from diffusion_runtime.weights.parallel_reads import StoredBytes
from diffusion_runtime.weights.stored_formats.float8 import FLOAT8, Float8
from diffusion_runtime.weights.stored_formats.gguf import GgufBlocks
from diffusion_runtime.weights.stored_formats.interface import StoredFormat
from diffusion_runtime.weights.tensor_files import TensorFile
from diffusion_runtime.weights.tensor_part import Ranges, TensorPart
from diffusion_runtime.weights.weight_files import DAMAGED


@dataclass(frozen=True)
class StoredRows:
    """Rows of a tensor. name: in its file; shape: of these rows; rows: which, None for all; columns: which of their
    numbers, None for all. layer: how they are stored, None for plain numbers. full_precision: the file wants products
    in the model's dtype."""

    file: TensorFile
    name: str
    shape: tuple[int, ...]
    rows: slice | None = None
    layer: LayerFormat | None = None
    full_precision: bool = False
    columns: Ranges | None = None

    @property
    def kind(self) -> str:
        return self.file.heads[self.name].kind

    @property
    def is_quantized(self) -> bool:
        return self.layer is not None

    @property
    def can_stay(self) -> bool:
        """Return whether these can stay as they are stored: the layers that hold such weights take no factors of
        inputs."""
        return self.layer is not None and self.layer.input_factors is None

    @property
    def format(self) -> StoredFormat | None:
        return None if self.layer is None else self.layer.format

    def some(self, start: int, stop: int) -> StoredRows:
        """Rows `start` to `stop` of these, which are all of the tensor."""
        return dataclasses.replace(self, shape=(stop - start, *self.shape[1:]), rows=slice(start, stop))

    def part(self, rows: slice, columns: Ranges | None) -> StoredRows:
        """Some of these rows, counted from the first of them, and of their columns."""
        first = 0 if self.rows is None else self.rows.start
        shape = TensorPart((rows,), columns).shape_of(self.shape)
        chosen = slice(first + rows.start, first + rows.stop)
        return dataclasses.replace(self, shape=shape, rows=chosen, columns=columns)

    def as_shape(self, shape: tuple[int, ...]) -> StoredRows:
        """These in another shape where the two differ by dimensions of one number alone, or these are plain numbers in
        one row; as they are otherwise."""
        same = [size for size in self.shape if size != 1] == [size for size in shape if size != 1]
        same |= not self.is_quantized and self.shape == (math.prod(shape),)
        return dataclasses.replace(self, shape=shape) if same else self

    def stored_bytes(self) -> StoredBytes | None:
        """Return where the numbers are in the file if they are stored plainly, in one run; None otherwise."""
        in_one_run = not self.is_quantized and self.columns is None
        return self.file.stored_bytes(self.name, self.rows) if in_one_run else None

    def numbers(self, dtype: torch.dtype, *, mapped: bool = False) -> torch.Tensor:
        """[*shape] on the CPU: as they are stored, quantised ones in float32. dtype: what they will be converted to.
        mapped: in pages of the file, of which the system may take back what is not in use, where that is possible.

        Raises ModelLoadError for numbers that nothing can be computed with.
        """
        if self.is_quantized:
            stored = self._dequantized()
        else:
            is_whole = self.rows is None and self.columns is None
            read = self.file.mapped if mapped and is_whole else self._read
            stored = read(self.name)
            if self.file.is_gguf:
                stored = stored.view(PLAIN_KINDS[self.kind])
        if dtype.is_floating_point and not stored.is_floating_point():
            raise self.error(f"tensor {shown_name(self.name)} is stored as {self.kind}, expected BF16, F16 or F32")
        wrong = unusable_numbers(stored, dtype)
        if wrong is not None:
            raise self.error(f"tensor {self.name} {wrong}. {DAMAGED}")
        return stored.view(self.shape)

    def _dequantized(self) -> torch.Tensor:
        """float32 [rows, columns]; columns times the factors of inputs, where the layer has them."""
        assert self.layer is not None
        stored, place = self.packed().numbers(), self.layer.input_factors
        if place is None:
            return stored
        factors = place.file.read(place.name).float()
        if (wrong := place.companion.wrong_number(factors)) is not None:
            raise ModelLoadError(f"{place.file.path}: {shown_name(place.name)} {wrong}. {DAMAGED}")
        return stored * (factors if self.columns is None else torch.cat([factors[each] for each in self.columns]))

    def _read(self, name: str) -> torch.Tensor:
        return self.file.read(name, self.rows, self.columns)

    @property
    def packed_part(self) -> StoredPart:
        """Description of `packed` from the file's head."""
        assert self.layer is not None
        num_rows = self.shape[0]
        heads = self.layer.format.heads(num_rows, math.prod(self.shape) // max(1, num_rows))
        return StoredPart(self.layer.format, num_rows, heads)

    def packed(self) -> PackedRows:
        """The tensors of quantised rows. Raises ModelLoadError for numbers that nothing can be computed with, such as
        NaN, and scales that are not positive."""
        assert self.layer is not None
        stored, beside = self.layer.format, {}
        for suffix, place in self.layer.beside.items():
            beside[suffix] = place.file.read(place.name)
            wrong = place.companion.wrong_number(beside[suffix].float())
            if wrong is not None:
                raise ModelLoadError(f"{place.file.path}: {shown_name(place.name)} {wrong}. {DAMAGED}")
        num_rows = next(iter(self.file.heads[self.name].shape), 1)
        try:
            tensors = stored.tensors(self._read(self.name), beside, self.rows, num_rows)
        except ModelLoadError as error:
            raise self.error(f"tensor {self.name} {error}. {DAMAGED}") from error
        num_by_row = sum(each.by_row for each in self.packed_part.tensors)
        return PackedRows(stored, tensors, num_by_row)

    def quantized_rows(self) -> QuantizedRows:
        """Read rows as the 8-bit layer of their format holds them. Raises what `packed` raises."""
        assert self.layer is not None
        return self.layer.format.quantized_rows(self.packed().tensors)

    def error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path}: {what}")


# By tensor name: its rows, one after the other.
Rows: TypeAlias = dict[str, tuple[StoredRows, ...]]


def some_rows(rows: Sequence[StoredRows], part: TensorPart) -> tuple[StoredRows, ...]:
    """A part of a tensor, of which these are all rows, one after the other."""
    if part.rows is None and part.columns is None:
        return tuple(rows)
    found, first = [], 0
    ranges = part.rows if part.rows is not None else (slice(0, sum(each.shape[0] for each in rows)),)
    for each in rows:
        stop = first + each.shape[0]
        for wanted in ranges:
            start, end = max(wanted.start, first), min(wanted.stop, stop)
            if start < end:
                found.append(each.part(slice(start - first, end - first), part.columns))
        first = stop
    return tuple(found)


def plain_rows(files: Sequence[TensorFile]) -> Rows:
    """Every tensor of some files."""
    return {
        name: (StoredRows(file, name, head.shape, layer=LayerFormat(Float8()) if head.kind in FLOAT8 else None),)
        for file in files
        for name, head in file.heads.items()
    }


def stored_rows(files: Sequence[TensorFile]) -> Rows:
    """Every tensor of a transformer's files but scales and marks, which go to the tensors that they are for. Raises
    what find_formats raises."""
    formats = find_formats(files)
    rows: Rows = {}
    for file in files:
        for name, head in file.heads.items():
            if name in formats.unread:
                continue
            layer, shape = formats.of.get(name), head.shape
            if file.is_gguf and head.kind not in PLAIN_KINDS:
                layer = LayerFormat(GgufBlocks(head.kind))
            elif layer is not None:
                shape = layer.format.shape(shape)
            rows[name] = (StoredRows(file, name, shape, None, layer, name in formats.full_precision),)
    return rows
