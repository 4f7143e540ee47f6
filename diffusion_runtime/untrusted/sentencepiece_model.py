"""A SentencePiece model (spiece.model), read within limits: pieces with their scores, and its normalisation.

It is a protocol buffer (google/sentencepiece, src/sentencepiece_model.proto), of which the few fields that a tokenizer
is made of are read. Lengths are checked against the content before anything is taken from it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.untrusted.files import read_file

# Those of large language models have 262,144 pieces in 5 MB.
MAX_BYTES = 64 << 20
_MAX_PIECES = 1_000_000
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
UNIGRAM, BPE = 1, 2
# Types of pieces; llama.cpp's are the same.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class SentencePieceModel:
    """pieces: with their scores, by their ids. unknown_id: of the piece for what no other covers. charsmap: the
    compiled table of replacements of its normalisation, empty for none. types: of each piece; kind: UNIGRAM or BPE.
    has_bytes: whether text that no piece covers becomes bytes (`<0x0A>`)."""

    pieces: tuple[tuple[str, float], ...]
    unknown_id: int
    charsmap: bytes
    types: tuple[int, ...] = ()
    kind: int = UNIGRAM
    has_bytes: bool = False


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ModelLoadError for a file that is missing, cut off or damaged, and for one that is no Unigram model."""
    return parse_sentencepiece(read_file(path, max_bytes=MAX_BYTES, error=ModelLoadError), str(path), (UNIGRAM,))


def parse_sentencepiece(content: bytes, path: str, kinds: tuple[int, ...]) -> SentencePieceModel:
    """Return the model of a file's content. path: for messages; kinds: that are expected. Raises ModelLoadError."""
    pieces: list[tuple[str, float]] = []
    types: list[int] = []
    kind, unknown_id, charsmap, has_bytes = UNIGRAM, 0, b"", False
    try:
        for field, value in _fields(content):
            if field == 1 and isinstance(value, bytes):
                piece, score, piece_type = _piece(value)
                pieces.append((piece, score))
                types.append(piece_type)
                if len(pieces) > _MAX_PIECES:
                    raise ValueError(f"more than {_MAX_PIECES} pieces")
            elif field == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
                kind, unknown_id = _number(trainer.get(3, UNIGRAM)), _number(trainer.get(40, 0))
                has_bytes = bool(_number(trainer.get(35, 0)))
            elif field == 3 and isinstance(value, bytes):
                found = dict(_fields(value)).get(2, b"")
                charsmap = found if isinstance(found, bytes) else b""
    except (ValueError, struct.error) as error:
        raise ModelLoadError(f"{path}: no SentencePiece model, or a damaged one: {error}; copy it again") from error
    if kind not in kinds:
        names = " or ".join({UNIGRAM: "Unigram", BPE: "BPE"}[each] for each in kinds)
        raise ModelLoadError(f"{path}: expected a {names} model, got one of type {kind}; this is not supported")
    if not pieces or not 0 <= unknown_id < len(pieces):
        raise ModelLoadError(f"{path}: {len(pieces)} pieces, and the unknown one is number {unknown_id}; copy it again")
    return SentencePieceModel(tuple(pieces), unknown_id, charsmap, tuple(types), kind, has_bytes)


def _piece(content: bytes) -> tuple[str, float, int]:
    values = dict(_fields(content))
    text, score = values.get(1, b""), values.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece without a text")
    return text.decode("utf-8"), float(struct.unpack("<f", score)[0]), _number(values.get(3, NORMAL))


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
