"""Tensor files: the tensors of one safetensors file by name, read one after the other, as they are stored."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.untrusted.files import check_file, open_file
from diffusion_runtime.weights.parallel_reads import ParallelReads, StoredBytes
from diffusion_runtime.weights.tensor_part import Ranges
from diffusion_runtime.weights.weight_files import CONVERT, SAFETENSORS, stored_heads, stored_offsets

# safetensors' names of what is read without it: bytes as they are.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    # Exponents of blocks (MXFP8).
    "F8_E8M0": torch.uint8,
}


@dataclass(frozen=True)
class TensorHead:
    """The entry of a tensor in the head of a file. kind: the file format's name of how it is stored, such as `BF16`,
    `F8_E4M3` or `Q4_K`."""

    shape: tuple[int, ...]
    kind: str


class TensorFile(ABC):
    """An open file of tensors. is_gguf: whether they are read as bytes; heads: of every tensor, by name; metadata: the
    texts stored with them."""

    is_gguf = False
    path: Path
    heads: Mapping[str, TensorHead]
    metadata: Mapping[str, str]

    @abstractmethod
    def read(self, name: str, rows: slice | None = None, columns: Ranges | None = None) -> torch.Tensor:
        """A tensor on the CPU, or some of its rows or of its columns, as it is stored; of a GGUF file uint8 [rows,
        bytes], with all columns."""

    def mapped(self, name: str) -> torch.Tensor:
        """Return the tensor as `read` does, where possible in pages that the system may drop and read again."""
        return self.read(name)

    def stored_bytes(self, name: str, rows: slice | None = None) -> StoredBytes | None:
        """Return where a tensor, or some of its rows, are in the file; None where the bytes are not
        its numbers alone."""
        del name, rows
        return None

    @abstractmethod
    def close(self) -> None:
        """Nothing is read afterwards; tensors that were read stay."""


class SafetensorsFile(TensorFile):
    """prefix: of the names of a part of the file, which is then all of it (file_parts.py). Raises ModelLoadError for a
    file that is missing, cut off, damaged, or a Git-LFS pointer."""

    # A reader of several files has one for all of them.
    reads: ParallelReads | None = None

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path = path
        self._prefix = prefix
        heads, self.metadata = stored_heads(path)
        self.heads = {
            name.removeprefix(prefix): TensorHead(head.shape, head.kind)
            for name, head in heads.items()
            if name.startswith(prefix)
        }
        self._offsets = {name: (head.begin, head.end) for name, head in heads.items()}
        self._stack = contextlib.ExitStack()
        self._descriptor = self._stack.enter_context(open_file(path, error=ModelLoadError)).fileno()

    @functools.cached_property
    def _file(self) -> Any:
        """The file as safetensors maps it, which a file larger than the machine's memory cannot be: most tensors are
        read without. Raises ModelLoadError."""
        from safetensors import SafetensorError, safe_open

        try:
            return self._stack.enter_context(safe_open(self.path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{self.path} is damaged or not a whole safetensors file ({first_line(error)}); copy or download it "
                "again"
            ) from error
        except RuntimeError as error:
            raise ModelLoadError(
                f"{self.path} cannot be mapped into this machine's memory: {first_line(error)}"
            ) from error

    def read(self, name: str, rows: slice | None = None, columns: Ranges | None = None) -> torch.Tensor:
        if columns is not None:
            of_rows = self._file.get_slice(self._prefix + name)
            parts = [of_rows[slice(None) if rows is None else rows, each] for each in columns]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        stored = self.stored_bytes(name, rows)
        if stored is None:
            stored_as = self._prefix + name
            of_file = self._file
            tensor: torch.Tensor = of_file.get_tensor(stored_as) if rows is None else of_file.get_slice(stored_as)[rows]
            return tensor
        shape = self.heads[name].shape
        shape = shape if rows is None else (len(range(*rows.indices(shape[0]))), *shape[1:])
        target = torch.empty(shape, dtype=stored.dtype)
        if self.reads is not None:
            self.reads.into(stored, target)()
        elif stored.num_bytes:
            stored.read(0, target.view(-1).view(torch.uint8))
        return target

    def mapped(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(self._prefix + name)
        return tensor

    def stored_bytes(self, name: str, rows: slice | None = None) -> StoredBytes | None:
        head = self.heads[name]
        dtype, (begin, end) = _DTYPES.get(head.kind), self._offsets[self._prefix + name]
        if dtype is None or not hasattr(os, "preadv") or end - begin != math.prod(head.shape) * dtype.itemsize:
            return None
        if rows is not None:
            start, stop, step = rows.indices(head.shape[0])
            row = (end - begin) // max(1, head.shape[0])
            if step != 1:
                return None
            begin, end = begin + start * row, begin + max(start, stop) * row
        return StoredBytes(self.path, self._descriptor, begin, end - begin, dtype)

    def close(self) -> None:
        self._stack.close()


def read_tensors(path: Path, key: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor of one safetensors file, on the CPU, and its metadata. key: what named it.

    Raises ConfigError for a path that is no file's, ModelLoadError for a file that is missing, damaged, or of another
    kind.
    """
    from safetensors import SafetensorError, safe_open

    check_file(path, key, missing=ModelLoadError)
    if path.suffix not in SAFETENSORS:
        raise ModelLoadError(
            f"{path}: expected a .safetensors file; a pickle can run code when it is opened: {CONVERT}"
        )
    stored_offsets(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or not a whole safetensors file ({first_line(error)})") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file of these. Raises OSError."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path)


def tensor_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the contents of a safetensors file of these, for a file that is open already."""
    from safetensors.torch import save

    return save(dict(tensors), dict(metadata))


def stream_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
) -> int:
    """A safetensors file of tensors of one dtype, each read when it is written; the size of the file. read: a tensor of
    the shape that is announced, on the CPU, by its name. Raises OSError, and what `read` raises."""
    kind = next(name for name, known in _DTYPES.items() if known == dtype)
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * dtype.itemsize
        head[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = read(name)
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
                raise ModelLoadError(f"{name}: expected {list(shape)} in {kind}, got {list(tensor.shape)}")
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return file.tell()
