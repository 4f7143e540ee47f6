"""A tiny LTX-2 folder, written once for these tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_ltx2 import write_tiny_ltx2


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: tests share it."""
    return write_tiny_ltx2(tmp_path_factory.mktemp("models") / "tiny_ltx2")


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy that the test may damage."""
    return lambda: Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
