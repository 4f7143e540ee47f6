"""The head of a GGUF file, read within limits: metadata, and where its tensors are (ggml's format, versions 2 and 3).

Every number in it is a stranger's: counts and lengths are bounded before anything is read or reserved for them, and
every tensor lies inside of the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from diffusion_runtime.errors import ModelLoadError, shown, shown_name
from diffusion_runtime.untrusted.files import open_file

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Ten times what a transformer has (Wan 14B 1,095 tensors, FLUX.1 780); telling its family looks at every name.
MAX_TENSORS = 20_000
_MAX_VALUES = 10_000
# Of all arrays of metadata together; files of language models hold their vocabulary, those of transformers nothing.
_MAX_ARRAY_ITEMS = 2_000_000
_MAX_TEXT_BYTES = 1_000_000
# Of all texts and names of a head, as safetensors bounds its own.
_MAX_HEAD_TEXT_BYTES = 100_000_000
_MAX_NAME_BYTES = 300
# Kept of an array: shapes are shorter.
_MAX_KEPT_ITEMS = 16
# ggml's own limit is 4; files of video models have convolutions of 5.
_MAX_DIMENSIONS = 8
_MAX_ALIGNMENT = 1 << 16

# ggml's number of a type -> (name, numbers per block, bytes per block).
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
}
_SIZES = {name: (numbers, num_bytes) for name, numbers, num_bytes in TYPES.values()}
# Of types that are not read, for messages.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


def num_bytes_of(kind: str, numbers: int) -> int:
    """Count the bytes of whole blocks of a type by name."""
    block, block_bytes = _SIZES[kind]
    return numbers // block * block_bytes


@dataclass(frozen=True)
class GgufTensor:
    """shape: rows first, as everywhere but in the file. type: its name; offset, num_bytes: in the file."""

    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """metadata: numbers, texts, and arrays: of up to a few items, or whole where that was asked for."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor] = field(default_factory=dict)


def read_gguf_header(path: Path, whole: Collection[str] = ()) -> GgufHeader:
    """Read the head. whole: keys whose arrays are kept with all of their items, such as a vocabulary.

    Raises ModelLoadError for a file that is missing, cut off, damaged, of another version or byte order, and for
    tensors of types that are not read."""
    with open_file(path, error=ModelLoadError) as file:
        size = file.seek(0, 2)
        file.seek(0)
        try:
            return _Reader(path, file, size, frozenset(whole)).header()
        except struct.error as error:
            raise ModelLoadError(f"{path} is cut off in its head; copy or download it again") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int, whole: frozenset[str]) -> None:
        self.path, self.file, self.size, self.whole = path, file, size, whole
        self.num_items = self.num_text_bytes = 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != MAGIC:
            raise self._damaged("it does not start with GGUF")
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{self.path}: expected GGUF of version {' or '.join(map(str, _VERSIONS))}, got {version}; numbers of "
                "the other byte order are not read"
            )
        num_tensors, num_values = self._unpack("QQ")
        if num_tensors > MAX_TENSORS or num_values > _MAX_VALUES:
            raise self._damaged(
                f"it would hold {num_tensors} tensors and {num_values} values, more than "
                f"{MAX_TENSORS} and {_MAX_VALUES}"
            )
        metadata = {}
        for _ in range(num_values):
            name = self._text(_MAX_TEXT_BYTES)
            if name in metadata:
                raise self._damaged(f"key {shown_name(name)} is there twice")
            metadata[name] = self._value(name, self._unpack("I")[0])
        heads: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._text(_MAX_NAME_BYTES)
            if name in heads:
                raise self._damaged(f"tensor {shown_name(name)} is there twice")
            heads[name] = self._tensor(name)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise self._damaged(f"general.alignment is {shown(alignment)}")
        start = -(-self.file.tell() // alignment) * alignment
        tensors = {name: self._placed(name, *head, start) for name, head in heads.items()}
        reached, before = start, ""
        for name, tensor in sorted(tensors.items(), key=lambda each: each[1].offset):
            place = tensor.offset - start
            if tensor.offset < reached or place % alignment:
                beside = f"in tensor {shown_name(before)}" if tensor.offset < reached else f"no multiple of {alignment}"
                raise self._damaged(f"tensor {shown_name(name)} would begin {place} bytes behind the head, {beside}")
            reached, before = tensor.offset + tensor.num_bytes, name
        return GgufHeader(metadata, tensors)

    def _tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """(shape, number of the type, offset behind the head)."""
        (num_dimensions,) = self._unpack("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {shown_name(name)} has {num_dimensions} dimensions")
        sizes = self._unpack(f"{num_dimensions}Q")
        kind, offset = self._unpack("IQ")
        if min(sizes) < 1:
            raise self._damaged(f"tensor {shown_name(name)} has sizes {list(sizes)}")
        return tuple(reversed(sizes)), kind, offset

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> GgufTensor:
        if kind not in TYPES:
            raise ModelLoadError(
                f"{self.path}: tensor {shown_name(name)} is stored as {_OTHER_TYPES.get(kind, f'type {kind}')}; this "
                f"runtime reads {', '.join(known for known, _, _ in TYPES.values())}. Use a file of one of these"
            )
        label, block, block_bytes = TYPES[kind]
        numbers = math.prod(shape)
        num_bytes = numbers // block * block_bytes
        if shape[-1] % block or start + offset + num_bytes > self.size:
            raise self._damaged(
                f"tensor {shown_name(name)}, {label} {list(shape)}, would be {num_bytes} bytes at {start + offset}, "
                f"and the file has {self.size}"
            )
        return GgufTensor(shape, label, start + offset, num_bytes)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            return self._text(_MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._damaged(f"the value of {shown_name(key)} has type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _array(self, key: str) -> list[Any]:
        """Read the first items of an array, or all of one that is kept whole; the others are passed over."""
        kind, length = self._unpack("IQ")
        self.num_items += length
        if self.num_items > _MAX_ARRAY_ITEMS or (kind != _TEXT and kind not in _SCALARS):
            raise self._damaged(f"{shown_name(key)} would hold {length} items of type {kind}")
        num_kept = length if key in self.whole else _MAX_KEPT_ITEMS
        if kind == _TEXT:
            kept = []
            for index in range(length):
                text = self._text(_MAX_TEXT_BYTES)
                if index < num_kept:
                    kept.append(text)
            return kept
        return list(self._unpack(f"{length}{_SCALARS[kind]}"))[:num_kept]

    def _text(self, max_bytes: int) -> str:
        (length,) = self._unpack("Q")
        if length > max_bytes:
            raise self._damaged(f"a text in its head would be {length} bytes")
        self.num_text_bytes += length
        if self.num_text_bytes > _MAX_HEAD_TEXT_BYTES:
            raise self._damaged(f"the texts of its head would be more than {_MAX_HEAD_TEXT_BYTES} bytes")
        return self._bytes(length).decode("utf-8", errors="replace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._bytes(struct.calcsize(f"<{layout}")))

    def _bytes(self, length: int) -> bytes:
        content = self.file.read(length)
        if len(content) < length:
            raise struct.error
        return content

    def _damaged(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged or not a GGUF file: {why}; copy or download it again")
