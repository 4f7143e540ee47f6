"""GGUF files of transformers, written by the format's own package."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

Tensors = dict[str, torch.Tensor]


def write_gguf(
    path: Path, tensors: Mapping[str, torch.Tensor], kind_of: Callable[[str], str], architecture: str = "flux"
) -> Tensors:
    """Writes a file; the float32 numbers that it stands for. kind_of: the type of a matrix of whole blocks, by its
    name; everything else stays float32."""
    writer = GGUFWriter(str(path), architecture)
    meant: Tensors = {}
    for name, tensor in tensors.items():
        has_blocks = tensor.dim() == 2 and tensor.shape[1] % 32 == 0
        kind = GGMLQuantizationType[kind_of(name) if has_blocks else "F32"]
        data = quantize(tensor.numpy().astype(numpy.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        meant[name] = torch.from_numpy(dequantize(data, kind).reshape(tensor.shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def head(
    *, version: int = 3, num_tensors: int = 1, num_values: int = 0, values: bytes = b"", tensors: bytes = b""
) -> bytes:
    """A file of what is given, right or wrong."""
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + values + tensors


def text(value: str | bytes, length: int | None = None) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content) if length is None else length) + content


def tensor(name: str = "a", sizes: tuple[int, ...] = (32, 2), kind: int = 8, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
