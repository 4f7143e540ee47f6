"""GGUF files as files of tensors: blocks as bytes, mapped from the file."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.untrusted.files import open_file
from diffusion_runtime.untrusted.gguf_header import TYPES, GgufTensor, read_gguf_header
from diffusion_runtime.weights.tensor_files import TensorFile, TensorHead
from diffusion_runtime.weights.tensor_part import Ranges

# How a tensor was shaped before it got too many dimensions, or rows of too few numbers, for the format.
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."


class GgufFile(TensorFile):
    """A GGUF file. architecture: the model kind it declares, such as `flux` or `wan`; values: its metadata.

    Raises ModelLoadError for a file that is missing, cut off or damaged, and for tensors of types that are not read.
    """

    is_gguf = True

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.path = path
        self.architecture = str(header.metadata.get("general.architecture", ""))
        self.values = header.metadata
        self.metadata: Mapping[str, str] = {}
        self._tensors = header.tensors
        self.heads = self._in_file = {
            name: TensorHead(_original_shape(name, tensor, header.metadata), tensor.type)
            for name, tensor in header.tensors.items()
        }
        with open_file(path, error=ModelLoadError) as file:
            # Private pages: torch has no read-only tensors.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if header.tensors else None

    def read(self, name: str, rows: slice | None = None, columns: Ranges | None = None) -> torch.Tensor:
        """uint8 [rows, bytes] of any tensor, a copy."""
        assert columns is None, "a row is read whole: its blocks hold many columns each"
        tensor = self._tensors[name]
        assert self._map is not None
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)
        by_row = data.view(self._in_file[name].shape[0], -1)
        return (by_row if rows is None else by_row[rows]).clone()

    def close(self) -> None:
        # Copies alone were handed out.
        if self._map is not None:
            self._map.close()
            self._map = None


def _original_shape(name: str, tensor: GgufTensor, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    kept = metadata.get(f"{_ORIGINAL_SHAPE}{name}")
    if not isinstance(kept, list) or not kept or not all(type(size) is int and size > 0 for size in kept):
        return tensor.shape
    block, block_bytes = next((block, size) for name, block, size in TYPES.values() if name == tensor.type)
    # Rows of whole blocks, so that some of them can be read.
    row = math.prod(kept[1:])
    is_whole = row % block == 0 and tensor.num_bytes == kept[0] * (row // block) * block_bytes
    return tuple(kept) if is_whole else tensor.shape
