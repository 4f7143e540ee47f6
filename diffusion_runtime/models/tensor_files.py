"""Tensor files: the tensors of one safetensors file by name, read one after the other, as they are stored."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.models.weight_files import check_whole
from diffusion_runtime.untrusted.files import check_file


@dataclass(frozen=True)
class TensorHead:
    """What the head of a file says of a tensor. kind: the file format's name of how it is stored, such as `BF16`,
    `F8_E4M3` or `Q4_K`."""

    shape: tuple[int, ...]
    kind: str


class TensorFile(ABC):
    """An open file of tensors. is_gguf: whether they are read as bytes; heads: of every tensor, by name; metadata: the
    texts beside them."""

    is_gguf = False
    path: Path
    heads: Mapping[str, TensorHead]
    metadata: Mapping[str, str]

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor on the CPU, or some of its rows, as it is stored; of a GGUF file uint8 [rows, bytes]."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is read afterwards; tensors that were read stay."""


class SafetensorsFile(TensorFile):
    """Raises ModelLoadError for a file that is missing, cut off, damaged, or a Git-LFS pointer."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        check_whole(path)
        self.path = path
        try:
            self._stack = contextlib.ExitStack()
            self._file = self._stack.enter_context(safe_open(path, framework="pt"))
            heads = {}
            for name in self._file.keys():  # noqa: SIM118 - it is not a mapping
                tensor = self._file.get_slice(name)
                heads[name] = TensorHead(tuple(tensor.get_shape()), tensor.get_dtype())
            self.heads = heads
            self.metadata = dict(self._file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} is damaged or not a whole safetensors file ({first_line(error)}); copy or download it again"
            ) from error

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name) if rows is None else self._file.get_slice(name)[rows]
        return tensor

    def close(self) -> None:
        self._stack.close()


def read_tensors(path: Path, key: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor of one safetensors file, on the CPU, and its metadata. key: what named it.

    Raises ConfigError for a path that is no file's, ModelLoadError for a file that is missing, damaged, or of another
    kind.
    """
    from safetensors import SafetensorError, safe_open

    check_file(path, key, missing=ModelLoadError)
    if path.suffix != ".safetensors":
        raise ModelLoadError(f"{path}: expected a .safetensors file; a pickle can run code when it is opened")
    check_whole(path)
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
