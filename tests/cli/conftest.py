"""Fixtures for command lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_support import Command, Result, tiny_arguments

from diffusion_runtime.cli.app import run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models so small that threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    one_thread: None,
) -> Command:
    """Run a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    # The command tunes the allocator of its process unless the user did; this process is not the command's.
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "134217728")

    def run_here(*arguments: str) -> Result:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run_here


@pytest.fixture
def tiny_flags(tiny_wan_folder: Path) -> tuple[str, ...]:
    """A generation of the tiny model that takes a few hundredths of a second."""
    return tiny_arguments(tiny_wan_folder)
