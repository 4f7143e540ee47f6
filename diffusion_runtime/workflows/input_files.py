"""Files that LoadImage, LoadVideo and LoadAudio name: in ComfyUI's `input`, beside the workflow, or by
`--set`, whose values alone may be paths."""

from __future__ import annotations

import struct
from pathlib import Path

from diffusion_runtime.errors import shown
from diffusion_runtime.untrusted.files import open_file, user_path
from diffusion_runtime.workflows.graph import WorkflowError

_HEAD_BYTES = 64 * 1024


def found_input(name: str, places: tuple[Path, ...]) -> Path | None:
    """Return the path of a file by the name that a node has; None where there is none. places: folders in which it is
    looked for, and files that the user named. Raises WorkflowError for any other name that leads out of the folders."""
    # As the editor marks folders other than `input`.
    bare = name.removesuffix(" [input]").removesuffix(" [output]").replace("\\", "/")
    path = user_path(bare, "image", WorkflowError)
    if path in places:
        return path
    if path.is_absolute() or ".." in path.parts:
        raise WorkflowError(
            f"{shown(name)}: expected the name of a file in ComfyUI's `input`, got one outside of it; name it "
            "yourself: --set NODE.image=FILE"
        )
    return next((place / path for place in places if (place / path).is_file()), None)


def size_of(path: Path) -> tuple[int, int] | None:
    """Return width and height of a PNG or JPEG from its head; None for other files."""
    with open_file(path, error=WorkflowError) as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return (width, height) if 0 < width < 2**16 and 0 < height < 2**16 else None
    return _jpeg_size(head) if head.startswith(b"\xff\xd8") else None


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker, length = head[at + 1], int.from_bytes(head[at + 2 : at + 4], "big")
        # The frame's header, whichever of the codings.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return (width, height) if width and height else None
        at += 2 + length
    return None
