"""Standard streams that cannot show every letter, are closed, full, or left by their reader: the command succeeds,
unless its one result is an object on standard output, and there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from cli_support import process_environment, tiny_arguments

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file names as bytes, and a POSIX shell")
NAME = "größe-中-seed0.npy"


def command(*arguments: object, cwd: Path, streams: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command behind a shell's redirections `streams`."""
    words = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "diffusion_runtime", *map(str, arguments)]
    # UTF-8 for names of files, whatever the streams are; no coercion of the C locale, which would help the streams too.
    encodings = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C.UTF-8"}
    full = process_environment(**{**encodings, **environment})
    return subprocess.run(words, cwd=cwd, env=full, capture_output=True)


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    numpy.save(path, numpy.zeros((2, 8, 8, 3), numpy.uint8))
    return path


def test_a_stream_that_cannot_show_a_name(tiny_wan_folder: Path, tmp_path: Path) -> None:
    """The path is still the file's, for whoever reads it."""
    arguments = ("generate", "Größe 中", *tiny_arguments(tiny_wan_folder), "--format", "npy")
    done = command(*arguments, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"outputs/{NAME}\n".encode()
    assert (tmp_path / os.fsdecode(done.stdout.strip())).is_file()
    assert rb"wrote outputs/gr\xf6\xdfe-\u4e2d-seed0.npy" in done.stderr
    assert done.stderr.isascii()


def test_json_is_ascii_on_every_stream(npy: Path) -> None:
    """Names that no encoding has too."""
    strange = b"\xff.npy"
    os.link(npy, os.fsencode(npy.parent) + b"/" + strange)
    for name, encoding in ((NAME, "cp1252"), (os.fsdecode(strange), "utf-8")):
        done = command("info", name, "--json", cwd=npy.parent, PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.decode("ascii"))["path"] == name
    # And what is said to people.
    assert command("info", NAME, cwd=npy.parent, PYTHONIOENCODING="latin-1").returncode == 0


@pytest.mark.parametrize(
    ("streams", "has_output"),
    [(">&-", False), pytest.param("<&- >&- 2>&-", False, marks=pytest.mark.slow), ("2>/dev/full", True)],
)
def test_a_stream_that_is_closed_or_full(streams: str, has_output: bool, npy: Path) -> None:
    done = command("info", NAME, cwd=npy.parent, streams=streams)
    assert (done.returncode, done.stderr, bool(done.stdout)) == (0, b"", has_output)
    # An error has its exit code, and no traceback.
    failed = command("info", "missing.npy", cwd=npy.parent, streams=streams)
    assert (failed.returncode, failed.stderr) == (2, b"" if "2>" in streams else b"error: missing.npy: no such file\n")
    if not has_output:
        for verb in (("info", NAME), ("doctor",)):
            lost = command(*verb, "--json", cwd=npy.parent, streams=streams)
            assert lost.returncode == 1
            said = b"" if "2>" in streams else b"error: cannot write to standard output: it is closed, and --json"
            assert lost.stderr.startswith(said)
            assert lost.stderr.count(b"\n") == len(said[:1])
