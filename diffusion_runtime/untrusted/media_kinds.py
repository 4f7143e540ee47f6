"""Containers of media files by their first bytes (magic numbers), whatever their names say."""

from __future__ import annotations

from collections.abc import Callable

# Bytes of a file that decide.
HEAD_BYTES = 64
# The extension of files of each container, and how these begin. An mp4 begins with one of a few boxes.
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")
_CONTAINERS: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    (".png", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n")),
    (".jpg", lambda head: head.startswith(b"\xff\xd8\xff")),
    (".webp", lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP"),
    (".gif", lambda head: head[:6] in (b"GIF87a", b"GIF89a")),
    (".npy", lambda head: head.startswith(b"\x93NUMPY")),
    (".mp4", lambda head: head[4:8] in _BOXES),
    (".mkv", lambda head: head.startswith(b"\x1aE\xdf\xa3")),
    (".avi", lambda head: head[:4] == b"RIFF" and head[8:12] == b"AVI "),
    (".wav", lambda head: head[:4] == b"RIFF" and head[8:12] == b"WAVE"),
    (".flac", lambda head: head.startswith(b"fLaC")),
    (".ogg", lambda head: head.startswith(b"OggS")),
    (".aac", lambda head: head[:1] == b"\xff" and head[1:2] in (b"\xf0", b"\xf1", b"\xf8", b"\xf9")),
    (".mp3", lambda head: head.startswith(b"ID3") or (head[:1] == b"\xff" and head[1:2] >= b"\xe0")),
)
PICTURES = (".png", ".jpg", ".webp", ".gif")
# What may hold pictures that move, and what holds sound alone.
VIDEOS = (".mp4", ".mkv", ".avi", ".npy")
SOUNDS = (".wav", ".flac", ".ogg", ".aac", ".mp3")
# Other extensions of the same containers.
ALIKE = {
    ".jpeg": ".jpg",
    ".apng": ".png",
    ".m4v": ".mp4",
    ".mov": ".mp4",
    ".m4a": ".mp4",
    ".webm": ".mkv",
} | dict.fromkeys((".oga", ".opus"), ".ogg")


def container_of(head: bytes) -> str | None:
    """Return the usual extension of a file's container, None for one that is not known here. head: its first
    HEAD_BYTES, or all of it."""
    return next((suffix for suffix, begins in _CONTAINERS if begins(head)), None)
