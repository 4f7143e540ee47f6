"""Stored tensors: rows of a tensor in a file, with what makes numbers of them: 8-bit floats and their scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from diffusion_runtime.errors import ModelLoadError, shown_name
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows, dequantize
from diffusion_runtime.kernels.gguf_blocks import PLAIN_KINDS, block_scales, dequantize_blocks
from diffusion_runtime.layers.gguf_linear import GgufPart, GgufRows
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.untrusted.gguf_header import num_bytes_of
from diffusion_runtime.weights.fp8_scales import Scale, find_scales
from diffusion_runtime.weights.parallel_reads import StoredBytes
from diffusion_runtime.weights.tensor_files import TensorFile
from diffusion_runtime.weights.tensor_part import Ranges, TensorPart
from diffusion_runtime.weights.weight_files import DAMAGED

_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class StoredRows:
    """Rows of a tensor. name: in its file; shape: of these rows; rows: which, None for all; columns: which of their
    numbers, None for all. scale: of 8-bit floats, None for a plain cast. full_precision: the file wants products in the
    model's dtype."""

    file: TensorFile
    name: str
    shape: tuple[int, ...]
    rows: slice | None = None
    scale: Scale | None = None
    full_precision: bool = False
    columns: Ranges | None = None

    @property
    def kind(self) -> str:
        return self.file.heads[self.name].kind

    @property
    def is_quantized(self) -> bool:
        return self.dtype_of_float8 is not None or self.is_blocks

    @property
    def is_blocks(self) -> bool:
        """Return whether these are quantised blocks of a GGUF file."""
        return self.file.is_gguf and self.kind not in PLAIN_KINDS

    @property
    def dtype_of_float8(self) -> torch.dtype | None:
        """None for numbers of another kind."""
        return _FLOAT8.get(self.kind)

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
        """These in another shape where the two differ by dimensions of one number alone, as they are otherwise."""
        same = [size for size in self.shape if size != 1] == [size for size in shape if size != 1]
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
        if self.dtype_of_float8 is not None:
            return dequantize(self.float8_rows(), torch.float32).view(self.shape)
        is_whole = self.rows is None and self.columns is None
        stored = (
            self.file.mapped(self.name) if mapped and is_whole else self.file.read(self.name, self.rows, self.columns)
        )
        if self.file.is_gguf:
            plain = PLAIN_KINDS.get(self.kind)
            stored = dequantize_blocks(stored, self.kind) if plain is None else stored.view(plain)
        if dtype.is_floating_point and not stored.is_floating_point():
            raise self.error(f"tensor {shown_name(self.name)} is stored as {self.kind}, expected BF16, F16 or F32")
        wrong = unusable_numbers(stored, dtype)
        if wrong is not None:
            raise self.error(f"tensor {self.name} {wrong}. {DAMAGED}")
        return stored.view(self.shape)

    def float8_rows(self) -> QuantizedRows:
        """8-bit floats as they are stored, [rows, numbers per row], and a scale per row. Raises ModelLoadError for NaN
        and infinity, and for a scale that is not positive."""
        stored = self.file.read(self.name, self.rows, self.columns)
        values = stored.reshape(stored.shape[0] if stored.dim() else 1, -1)
        wrong = unusable_numbers(values)
        if wrong is not None:
            raise self.error(f"tensor {self.name} {wrong}. {DAMAGED}")
        return QuantizedRows(values, self.scales(values.shape[0]))

    def blocks_head(self) -> GgufPart:
        """Describe `blocks` from the file's head."""
        return GgufPart(self.kind, self.shape[0], num_bytes_of(self.kind, math.prod(self.shape)))

    def blocks(self) -> GgufRows:
        """Blocks of a GGUF file as they are stored. Raises ModelLoadError for scales that make no numbers."""
        data = self.file.read(self.name, self.rows, self.columns)
        wrong = unusable_numbers(block_scales(data, self.kind))
        if wrong is not None:
            raise self.error(f"tensor {self.name} {wrong}. {DAMAGED}")
        return GgufRows(self.kind, data)

    def error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path}: {what}")

    def scales(self, num_rows: int) -> torch.Tensor:
        """Return the scales of 8-bit floats, float32 [rows, 1]. Raises ModelLoadError for a scale that is not
        positive."""
        if self.scale is None:
            return torch.ones(num_rows, 1)
        scales = self.scale.file.read(self.scale.name).float().view(-1)
        wrong = ~(torch.isfinite(scales) & (scales > 0))
        if bool(wrong.any()):
            first = float(scales[wrong][0])
            raise ModelLoadError(
                f"{self.scale.file.path}: {shown_name(self.scale.name)} holds {first:g}; expected positive numbers. "
                f"{DAMAGED}"
            )
        if len(scales) == 1:
            return scales.view(1, 1).repeat(num_rows, 1)
        chosen = scales if self.rows is None else scales[self.rows]
        return chosen.view(-1, 1).clone()


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
    return {name: (StoredRows(file, name, head.shape),) for file in files for name, head in file.heads.items()}


def stored_rows(files: Sequence[TensorFile]) -> Rows:
    """Every tensor of a transformer's files but scales and marks, which go to the tensors that they are for. Raises
    what find_scales raises."""
    scales = find_scales(files)
    return {
        name: (StoredRows(file, name, head.shape, None, scales.of.get(name), name in scales.full_precision),)
        for file in files
        for name, head in file.heads.items()
        if name not in scales.unread
    }
