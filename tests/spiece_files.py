"""SentencePiece models, byte by byte (a protocol buffer)."""

from __future__ import annotations

import struct
from collections.abc import Iterable


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def text_field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def model_bytes(pieces: Iterable[tuple[str, float]], *, kind: int = 1, unknown_id: int = 2) -> bytes:
    """As SentencePiece writes it: pieces with score and type, then the trainer's settings."""
    out = b""
    for piece, score in pieces:
        out += text_field(1, text_field(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18\x01")
    return out + text_field(2, b"\x18" + varint(kind) + varint(40 << 3) + varint(unknown_id))
