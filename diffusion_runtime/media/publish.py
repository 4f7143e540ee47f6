"""Atomic publishing of files: they appear complete or not at all, and never replace another file by accident."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from diffusion_runtime.errors import DiskFullError, OutputError
from diffusion_runtime.untrusted.files import check_place, named, shown_path

if sys.platform != "win32":
    import fcntl

_SUFFIX = ".partial"
# Numbers of OSError for a disk, or a user's share of it, that is full.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Temporary files of this process, for an exit without unwinding.
_temporary_files: set[Path] = set()


@contextlib.contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """Context manager: create an empty file in `folder` under a unique name; removed afterwards, unless it was renamed.
    Raises OSError.

    It is locked while this process lives: see remove_abandoned_files.
    """
    path, file = _create(folder)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        _temporary_files.discard(path)
        os.close(file)


@contextlib.contextmanager
def published(target: Path, key: str = "") -> Iterator[Path]:
    """Context manager: a temporary file next to `target`, which takes its name when the block ends: over a file that is
    there, in a folder that is made where it is missing. Where `target` is a link, this holds for the file that it leads
    to, and the link stays. An error leaves everything as it was. key: the flag that named it.

    Raises OutputError for a place that no file can have (a folder, FIFO or device), and for any OSError of the block.
    """
    place = check_target(target, key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(place.parent) as partial:
            yield partial
            os.replace(partial, place)
    except OSError as error:
        raise cannot_write(target, error, key) from error


def check_target(target: Path, key: str = "") -> Path:
    """Check a path that a file is to take, and return it, or where it leads to as a link. key: the flag that named it.
    Raises OutputError for one that no file can have, and where a folder, FIFO or device is."""
    check_place(target, key, OutputError)
    if target.is_dir():
        raise OutputError(f"{named(key, target)}: it is a folder; give the name of a file in it")
    place = Path(os.path.realpath(target)) if target.is_symlink() else target
    if place.is_symlink():
        raise OutputError(f"{named(key, target)}: it is a link that leads to itself; give another name")
    return place


def publish_text(target: Path, text: str, key: str = "") -> None:
    """Write the whole file or none, as `published` does."""
    with published(target, key) as partial:
        partial.write_text(text, encoding="utf-8")


def publish_bytes(target: Path, content: bytes, key: str = "") -> None:
    """Write the whole file or none, as `published` does."""
    with published(target, key) as partial:
        partial.write_bytes(content)


def cannot_write(target: Path, error: OSError, key: str = "") -> OutputError:
    """Return the error for users when a file cannot be written."""
    kind = DiskFullError if error.errno in FULL_DISK else OutputError
    where = f"{key}: " if key else ""
    return kind(f"{where}cannot write {shown_path(target)}: {error.strerror or error}; nothing was left behind")


def _create(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f".{os.getpid()}-{_host()}-{secrets.token_hex(8)}{_SUFFIX}"
        _temporary_files.add(path)
        # os.open and not tempfile: a result gets the permissions of the user's umask, not 0600.
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            if sys.platform != "win32":
                # Without locks on this file system, no process removes files of another.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return path, file
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        # Another process took it for abandoned before it was locked.
        _temporary_files.discard(path)
        os.close(file)


def remove_abandoned_files(folder: Path) -> None:
    """Remove temporary files of processes of this host that no longer run; failures are ignored.

    The system releases a lock when its process ends, however it ends; a process id would be reused. Files of other
    hosts stay, as a shared file system may not show their locks.
    """
    if sys.platform == "win32":
        return
    for path in folder.glob(f".*-{_host()}-*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def remove_own_temporary_files() -> None:
    """Remove this process's temporary files when it exits without unwinding."""
    for path in tuple(_temporary_files):
        with contextlib.suppress(OSError):
            path.unlink()


def _host() -> str:
    return hashlib.blake2s(socket.gethostname().encode(), digest_size=4).hexdigest()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM are deferred until the block, which must be short, is done: it must not be left half
    executed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread() or None in handlers.values():
        yield
        return
    waiting: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: waiting.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in dict.fromkeys(waiting):
            signal.raise_signal(received)


def numbered(path: Path, number: int) -> Path:
    """`out.mp4`, `out-2.mp4`, `out-3.mp4`, ..."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def publish_numbered(source: Path, target: Path) -> Path:
    """Rename a finished temporary file to `target`, or to the first of its numbered names that is free; returns it.
    Raises OSError."""
    number = 1
    while not take_name(source, path := numbered(target, number)):
        number += 1
    return path


def publish_free(content: bytes, names: Iterable[Path]) -> Path:
    """Write the whole file or none, under the first of these names of one folder that is free; return it. Raises
    OutputError."""
    waiting = iter(names)
    place = next(waiting)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(place.parent) as partial:
            partial.write_bytes(content)
            while not take_name(partial, place):
                place = next(waiting)
    except OSError as error:
        raise cannot_write(place, error) from error
    return place


def publish_pair(media: Path, sidecar: Path, target: Path, *, overwrite: bool, sound: Path | None = None) -> Path:
    """Rename finished temporary files of one folder: to `target`, `target` with .json, and with .wav for a sound that
    the media file cannot carry.

    Without `overwrite` the first number is taken for which all names are free; the file system decides which process
    gets a name, so two never get the same one. The media file is renamed last: once it is visible, the others are.
    Returns the path of the media file. Raises OSError, and OutputError where a folder, FIFO or device has a name that
    is to be overwritten.
    """
    files = [(sidecar, ".json"), *([] if sound is None else [(sound, ".wav")]), (media, target.suffix)]
    if overwrite:
        # Before the first is renamed: none appears without the others.
        for _, suffix in files:
            check_target(target.with_suffix(suffix))
        for source, suffix in files:
            os.replace(source, target.with_suffix(suffix))
        return target
    number = 1
    while not _take_names(files, numbered(target, number)):
        number += 1
    return numbered(target, number)


def _take_names(files: Sequence[tuple[Path, str]], path: Path) -> bool:
    """Rename all files (source, suffix) to `path` with their suffix; none of them when one name is taken."""
    taken: list[tuple[Path, Path]] = []
    for source, suffix in files:
        name = path.with_suffix(suffix)
        try:
            is_free = take_name(source, name)
        except BaseException:
            for _, earlier in taken:
                earlier.unlink()
            raise
        if not is_free:
            # Release the other names, but keep the contents for the next try.
            for earlier_source, earlier in taken:
                os.replace(earlier, earlier_source)
            return False
        taken.append((source, name))
    return True


def take_name(source: Path, path: Path) -> bool:
    """Rename `source`, a file or a folder, to `path` unless that name is taken; False when it is. Raises OSError."""
    if source.is_dir():
        return _take_folder_name(source, path)
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError:
        return _take_name_without_links(source, path)
    source.unlink()
    return True


def _take_name_without_links(source: Path, path: Path) -> bool:
    """Do the same on a file system without hard links: reserve the name, then move over it."""
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


def _take_folder_name(source: Path, path: Path) -> bool:
    try:
        # The one of several that makes it has the name; a folder goes over an empty one as a whole.
        path.mkdir()
    except FileExistsError:
        return False
    try:
        os.replace(source, path)
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise
    return True
