"""MP4 metadata from the file's boxes, without decoding (ISO 14496-12, QuickTime `mdta`).

The file may be untrusted: every size is checked against what contains it, no reference is followed, and no other
program is started.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from diffusion_runtime.errors import OutputError
from diffusion_runtime.untrusted.files import open_file

MAX_MOOV_BYTES = 64 * 1024 * 1024
MAX_TOP_LEVEL_BOXES = 10_000
# A box of a film holds a few dozen others.
MAX_BOXES = 10_000


class BrokenMp4Error(ValueError):
    """The sizes of the boxes contradict each other."""


@dataclass(frozen=True)
class Mp4Facts:
    """Metadata of the first video track; fps is the average frames per second. comment: the `comment` tag, None without
    one; encoder: the program that wrote the file, as it says."""

    width: int
    height: int
    num_frames: int
    fps: float
    comment: bytes | None
    encoder: str | None = None


def read_mp4(path: Path) -> Mp4Facts:
    """Raises BrokenMp4Error for anything that is not a readable MP4 with a video track, OSError when unreadable."""
    with open_file(path, error=OutputError) as file:
        moov = _read_moov(file, path.stat().st_size)
    try:
        for track in _find(moov, b"trak"):
            media = _first(track, b"mdia")
            if _first(media, b"hdlr")[8:12] == b"vide":
                return _track_facts(track, media, _tags(moov))
    except (struct.error, UnicodeDecodeError) as error:
        raise BrokenMp4Error(f"a box is too short: {error}") from error
    raise BrokenMp4Error("no video track")


def _track_facts(track: bytes, media: bytes, tags: Mapping[bytes, bytes]) -> Mp4Facts:
    header = _first(track, b"tkhd")
    # Width and height are the last two fields, 16.16 fixed point, in both versions of the box.
    width, height = (value >> 16 for value in struct.unpack(">II", header[-8:]))
    media_header = _first(media, b"mdhd")
    timescale, duration = struct.unpack_from(
        *((">IQ", media_header, 20) if media_header[:1] == b"\x01" else (">II", media_header, 12))
    )
    table = _first(_first(media, b"minf"), b"stbl")
    num_frames = struct.unpack_from(">I", _first(table, b"stsz"), 8)[0]
    fps = num_frames * timescale / duration if duration else 0.0
    encoder = tags.get(b"encoder")
    return Mp4Facts(
        width, height, num_frames, fps, tags.get(b"comment"), None if encoder is None else encoder.decode("latin-1")
    )


def _tags(moov: bytes) -> Mapping[bytes, bytes]:
    """Return the values of the first `meta` box with custom keys (`-movflags use_metadata_tags`) by their keys."""
    for holder in (moov, *_find(moov, b"udta")):
        for meta in _find(holder, b"meta"):
            # QuickTime's meta is a plain box, ISO's starts with four bytes of version and flags.
            inner = meta if meta[4:8] == b"hdlr" else meta[4:]
            keys = next(_find(inner, b"keys"), None)
            items = next(_find(inner, b"ilst"), None)
            if keys is None or items is None:
                continue
            names = [name for _, name in _boxes(keys[8:])]
            found = {}
            for number, item in _boxes(items):
                index = struct.unpack(">I", number)[0] - 1
                if 0 <= index < len(names) and names[index] in (b"comment", b"encoder"):
                    found[names[index]] = _first(item, b"data")[8:]
            if found:
                return found
    return {}


def _read_moov(file: BinaryIO, file_size: int) -> bytes:
    position = 0
    for _ in range(MAX_TOP_LEVEL_BOXES):
        file.seek(position)
        header = file.read(16)
        if len(header) < 8:
            break
        size, kind = struct.unpack_from(">I4s", header)
        start = 8
        if size == 1 and len(header) == 16:
            size, start = struct.unpack_from(">Q", header, 8)[0], 16
        elif size == 0:
            size = file_size - position
        if size < start or position + size > file_size:
            raise BrokenMp4Error(f"box {kind!r} at {position} has a size of {size} bytes, the file has {file_size}")
        if kind == b"moov":
            if size > MAX_MOOV_BYTES:
                raise BrokenMp4Error(f"its index has {size} bytes, more than {MAX_MOOV_BYTES}")
            file.seek(position + start)
            return file.read(size - start)
        position += size
    raise BrokenMp4Error("no index (moov); the file is not an MP4 or was cut off")


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, payload) of every box in `data`."""
    position = 0
    for _ in range(MAX_BOXES):
        if position + 8 > len(data):
            return
        size, kind = struct.unpack_from(">I4s", data, position)
        if size < 8 or position + size > len(data):
            raise BrokenMp4Error(f"box {kind!r} has a size of {size} bytes, {len(data) - position} are left")
        yield kind, data[position + 8 : position + size]
        position += size
    raise BrokenMp4Error(f"more than {MAX_BOXES} boxes in one")


def _find(data: bytes, kind: bytes) -> Iterator[bytes]:
    return (payload for found, payload in _boxes(data) if found == kind)


def _first(data: bytes, kind: bytes) -> bytes:
    for payload in _find(data, kind):
        return payload
    raise BrokenMp4Error(f"no {kind!r} box")
