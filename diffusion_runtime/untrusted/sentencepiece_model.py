"""A SentencePiece model file (spiece.model), read within limits: pieces with their scores, and its normalisation.

The file is a protocol buffer (google/sentencepiece, src/sentencepiece_model.proto), of which the few fields that a
Unigram tokenizer is made of are read. Lengths are checked against the file before anything is taken from it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.untrusted.files import read_file

# Those of large language models have 256,000 pieces in 4 MB.
_MAX_BYTES = 64 << 20
_MAX_PIECES = 1_000_000
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_UNIGRAM = 1


@dataclass(frozen=True)
class SentencePieceModel:
    """pieces: with their scores, by their ids. unknown_id: of the piece for what no other covers. charsmap: the
    compiled table of replacements of its normalisation, empty for none."""

    pieces: tuple[tuple[str, float], ...]
    unknown_id: int
    charsmap: bytes


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ModelLoadError for a file that is missing, cut off or damaged, and for one that is no Unigram model."""
    content = read_file(path, max_bytes=_MAX_BYTES, error=ModelLoadError)
    pieces: list[tuple[str, float]] = []
    kind, unknown_id, charsmap = _UNIGRAM, 0, b""
    try:
        for field, value in _fields(content):
            if field == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
                if len(pieces) > _MAX_PIECES:
                    raise ValueError(f"more than {_MAX_PIECES} pieces")
            elif field == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
                kind, unknown_id = _number(trainer.get(3, _UNIGRAM)), _number(trainer.get(40, 0))
            elif field == 3 and isinstance(value, bytes):
                found = dict(_fields(value)).get(2, b"")
                charsmap = found if isinstance(found, bytes) else b""
    except (ValueError, struct.error) as error:
        raise ModelLoadError(f"{path}: no SentencePiece model, or a damaged one: {error}; copy it again") from error
    if kind != _UNIGRAM:
        raise ModelLoadError(f"{path}: expected a Unigram model, got one of type {kind}; this is not supported")
    if not pieces or not 0 <= unknown_id < len(pieces):
        raise ModelLoadError(f"{path}: {len(pieces)} pieces, and the unknown one is number {unknown_id}; copy it again")
    return SentencePieceModel(tuple(pieces), unknown_id, charsmap)


def _piece(content: bytes) -> tuple[str, float]:
    values = dict(_fields(content))
    text, score = values.get(1, b""), values.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece without a text")
    return text.decode("utf-8"), float(struct.unpack("<f", score)[0])


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a text where a number was expected")
    return value


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number of every field with its value: an integer, or the bytes of anything else."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(content, at)
            yield field, value
            continue
        length = {_FIXED32: 4, _FIXED64: 8}.get(wire)
        if wire == _BYTES:
            length, at = _varint(content, at)
        if length is None or at + length > len(content):
            raise ValueError(f"field {field} reaches beyond the end")
        yield field, content[at : at + length]
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(10):
        if at + index >= len(content):
            raise ValueError("it ends within a number")
        byte = content[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    raise ValueError("a number of more than 64 bits")
