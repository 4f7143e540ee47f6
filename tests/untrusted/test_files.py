"""Paths of strangers: whatever is not a regular file of bounded size is a typed error that names the key."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tables import table

from diffusion_runtime.errors import ConfigError, ModelLoadError, OutputError, RequestError
from diffusion_runtime.untrusted.files import check_place, open_file, read_file

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """What would wait on a FIFO for ever fails instead."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def bound_socket(folder: Path) -> Path:
    # The name of a socket may have 107 bytes.
    before = Path.cwd()
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
    finally:
        os.chdir(before)
    return folder / "socket"


def link(folder: Path, target: str) -> Path:
    (folder / "link").symlink_to(target)
    return folder / "link"


def written(folder: Path, content: bytes) -> Path:
    (folder / "file").write_bytes(content)
    return folder / "file"


REFUSED: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "a FIFO": (fifo, "this is a FIFO, expected a regular file"),
    "a device": (lambda _: "/dev/zero", "this is a device"),
    "a full device": (lambda _: "/dev/full", "this is a device"),
    "a link to a device": (lambda folder: link(folder, "/dev/urandom"), "this is a device"),
    "a link to itself": (lambda folder: link(folder, "link"), "cannot be read: Too many levels"),
    "a socket": (bound_socket, "this is a socket"),
    "a folder": (lambda folder: folder, "this is a folder"),
    "nothing": (lambda folder: folder / "missing", "no such file"),
    "a file as a folder": (lambda folder: written(folder, b"x") / "file", "no such file"),
    "a name of 300": (lambda folder: folder / ("n" * 300), "at most 255 bytes, got one of 300"),
    "a long path": (lambda _: "d/" * 3000, "a path of at most 4095 bytes, got 6000"),
    "NUL": (lambda _: "a\0b", "cannot hold NUL"),
    "half of a character": (lambda _: "a\ud800", "lone surrogate"),
    "no name": (lambda _: "", "expected a path, got an empty text"),
    "too large": (lambda folder: written(folder, b"x" * 101), "expected at most 100 bytes, got 101"),
    "a Git-LFS pointer": (lambda folder: written(folder, LFS_POINTER), "run `git lfs pull`"),
}


@table("name", REFUSED)
def test_what_is_no_regular_file_is_refused(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    path = make(tmp_path)
    for error in (ConfigError, RequestError, ModelLoadError, OutputError):
        with pytest.raises(error) as caught:
            open_file(path, "--flag", max_bytes=100, error=error)
        assert type(caught.value) is error
        assert str(caught.value).startswith("--flag: ")
        assert said in str(caught.value)
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()


def test_a_file_of_the_system_that_says_it_is_empty_is_bounded() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(ConfigError, match="expected at most 10 bytes, got more"):
        read_file("/proc/self/status", "key", max_bytes=10)


def test_a_regular_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    for name in ("x.yaml", "x\udcff", "日本", "n" * 255):
        path = tmp_path / name
        path.write_bytes(b"content")
        assert read_file(path, "key", max_bytes=7) == b"content"
    assert read_file(link(tmp_path, "x.yaml"), "key", max_bytes=7) == b"content"


def test_a_missing_file_may_be_another_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="missing: no such file; copy it"):
        open_file(tmp_path / "missing", missing=OutputError, advice="copy it")


@table("name", ["a FIFO", "a device", "a socket", "a name of 300", "NUL", "half of a character"])
def test_results_are_not_put_there(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ConfigError, match="--output-path: ") as caught:
        check_place(make(tmp_path), "--output-path")
    assert said in str(caught.value)


def test_results_are_put_into_folders_and_new_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new", written(tmp_path, b"x"), tmp_path / "a" / "b"):
        assert check_place(path, "--output-path") == path
