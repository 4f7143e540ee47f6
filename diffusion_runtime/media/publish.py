"""Files that appear complete or not at all, and that never take another file's name."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """An empty file in `folder` under a name of its own; gone afterwards, unless it was renamed. Raises OSError."""
    path = folder / f".{secrets.token_hex(8)}.partial"
    # os.open and not tempfile: a result gets the rights the user's umask gives, not 0600.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def numbered(path: Path, number: int) -> Path:
    """`out.mp4`, `out-2.mp4`, `out-3.mp4`, ..."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def publish_pair(media: Path, sidecar: Path, target: Path, *, overwrite: bool) -> Path:
    """Give two finished temporary files of the same folder their names: `target`, and `target` with .json.

    Without `overwrite` the first number is taken for which both names are free; the file system decides who gets a
    name, so two processes never get the same one. The sidecar comes first: whoever sees the media file finds both.
    Returns the name of the media file. Raises OSError.
    """
    if overwrite:
        os.replace(sidecar, target.with_suffix(".json"))
        os.replace(media, target)
        return target
    number = 1
    while True:
        path = numbered(target, number)
        if _take_name(sidecar, path.with_suffix(".json")):
            try:
                if _take_name(media, path):
                    return path
            except BaseException:
                path.with_suffix(".json").unlink()
                raise
            # The sidecar's name was free and the file's was not: give it back, but keep the content for the next try.
            os.replace(path.with_suffix(".json"), sidecar)
        number += 1


def _take_name(source: Path, path: Path) -> bool:
    """Rename `source` to `path` unless that name is taken; False when it is."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError:
        return _take_name_without_links(source, path)
    source.unlink()
    return True


def _take_name_without_links(source: Path, path: Path) -> bool:
    """The same on a file system without hard links: reserve the name, then move over it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    try:
        os.replace(source, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True
