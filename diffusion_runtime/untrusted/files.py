"""Opens untrusted paths (of a user, a config, a recipe or a model folder): regular files of bounded size alone.

A FIFO blocks its reader, /dev/zero never ends, and a device may act on being opened; none of them is opened.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError

LFS_PREFIX = b"version https://git-lfs"
# The specification's limit; a larger file is no Git LFS pointer.
_MAX_LFS_BYTES = 1024
# The longest name of a file on every common file system, in bytes.
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095
# A path that could have been typed is shown whole.
_MAX_SHOWN_CHARACTERS = 240

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_path(path: str | Path, key: str = "", error: type[DiffusionRuntimeError] = ConfigError) -> Path:
    """`path`, when it is one that a file can have; whether it exists is not checked. key: for the message.

    Raises `error` for an empty path, NUL, characters that no file name has, and names that are too long.
    """
    reason = _refuse_name(str(path))
    if reason is not None:
        raise error(_message(key, path, reason))
    return Path(path)


def user_path(path: str | Path, key: str = "", error: type[DiffusionRuntimeError] = ConfigError) -> Path:
    """Return a typed path with `~` and `~name` at its start expanded: the one way from a text to a Path, which may
    then be asked for without an error of the system's own. Raises what check_path raises."""
    text = str(path)
    # Not Path.expanduser, which raises for an unknown user name.
    return check_path(os.path.expanduser(text) if "\0" not in text else text, key, error)


def open_file(
    path: str | Path,
    key: str = "",
    *,
    max_bytes: int | None = None,
    error: type[DiffusionRuntimeError] = ConfigError,
    missing: type[DiffusionRuntimeError] | None = None,
    advice: str = "",
) -> BinaryIO:
    """Open a regular file for reading.

    key: the flag or key that named it, for messages. max_bytes: None for any size. missing: the error for a file that
    does not exist, None for `error`; advice: added to its message.

    Raises `error` for a path that cannot be one, a folder, FIFO, device or socket, a file that is too large or may not
    be read, and a Git LFS pointer.
    """
    checked = check_path(path, key, error)
    try:
        _refuse_kind(os.stat(checked).st_mode)
        # The opened file may differ from the one checked before, so it is checked again; O_NONBLOCK: a FIFO is then
        # opened at once.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(checked, flags), "rb")
        try:
            _refuse_content(file, max_bytes)
        except BaseException:
            file.close()
            raise
    except (FileNotFoundError, NotADirectoryError) as reason:
        kind = error if missing is None else missing
        raise kind(_message(key, path, "; ".join(filter(None, ("no such file", advice))))) from reason
    except _Unfit as reason:
        raise error(_message(key, path, str(reason))) from reason
    except OSError as reason:
        raise error(_message(key, path, f"cannot be read: {reason.strerror or reason}")) from reason
    return file


def read_file(
    path: str | Path,
    key: str = "",
    *,
    max_bytes: int,
    error: type[DiffusionRuntimeError] = ConfigError,
    missing: type[DiffusionRuntimeError] | None = None,
    advice: str = "",
) -> bytes:
    """Read the content of a file that open_file opens. Raises what it raises."""
    with open_file(path, key, max_bytes=max_bytes, error=error, missing=missing, advice=advice) as file:
        try:
            # Files of /proc report a size of 0 bytes.
            content = file.read(max_bytes + 1)
        except OSError as reason:
            raise error(_message(key, path, f"cannot be read: {reason.strerror or reason}")) from reason
    if len(content) > max_bytes:
        raise error(_message(key, path, f"expected at most {max_bytes} bytes, got more"))
    return content


def check_file(
    path: str | Path,
    key: str = "",
    *,
    max_bytes: int | None = None,
    error: type[DiffusionRuntimeError] = ConfigError,
    missing: type[DiffusionRuntimeError] | None = None,
    advice: str = "",
) -> Path:
    """Check a file as open_file does and return its path, for libraries that open by name. Raises what it raises."""
    open_file(path, key, max_bytes=max_bytes, error=error, missing=missing, advice=advice).close()
    return Path(path)


def check_place(path: str | Path, key: str = "", error: type[DiffusionRuntimeError] = ConfigError) -> Path:
    """Check a path that a folder or a file has or can be given.

    Raises `error` for a path that cannot be one, and for a device, FIFO or socket.
    """
    checked = check_path(path, key, error)
    try:
        mode = os.stat(checked).st_mode
        if not stat.S_ISDIR(mode):
            _refuse_kind(mode)
    except _Unfit as reason:
        raise error(_message(key, path, str(reason))) from reason
    except OSError:
        # It does not exist, or cannot be inspected: writing to it will show.
        pass
    return checked


def named(key: str, path: str | Path) -> str:
    """`--config: mine.yaml`, or the path alone where no key named it."""
    return f"{key}: {shown_path(path)}" if key else shown_path(path)


def shown_path(path: str | Path) -> str:
    """Return a path for a message: cut in the middle, and as a Python literal where it holds unprintable characters."""
    text = str(path)
    if not text.isprintable():
        text = repr(text)
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    half = _MAX_SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


class _Unfit(Exception):
    """Reason why a file is not read."""


def _message(key: str, path: str | Path, reason: str) -> str:
    return f"{named(key, path)}: {reason}"


def _refuse_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _Unfit(f"this is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, expected a regular file")


def _refuse_content(file: BinaryIO, max_bytes: int | None) -> None:
    state = os.fstat(file.fileno())
    _refuse_kind(state.st_mode)
    if max_bytes is not None and state.st_size > max_bytes:
        raise _Unfit(f"expected at most {max_bytes} bytes, got {state.st_size}")
    if state.st_size <= _MAX_LFS_BYTES and file.read(len(LFS_PREFIX)) == LFS_PREFIX:
        raise _Unfit(
            f"is a Git-LFS pointer of {state.st_size} bytes, not the file itself; run `git lfs pull` in its folder"
        )
    file.seek(0)


def _refuse_name(text: str) -> str | None:
    if not text:
        return "expected a path, got an empty text"
    if "\0" in text:
        return "a path cannot hold NUL"
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        return "a path cannot hold a lone surrogate (half of a character)"
    if len(encoded) > MAX_PATH_BYTES:
        return f"expected a path of at most {MAX_PATH_BYTES} bytes, got {len(encoded)}"
    longest = max(len(os.fsencode(name)) for name in re.split(r"[/\\]" if os.name == "nt" else "/", text))
    if longest > MAX_NAME_BYTES:
        return f"expected names of at most {MAX_NAME_BYTES} bytes, got one of {longest}"
    return None
