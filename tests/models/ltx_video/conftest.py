"""A tiny LTX-Video folder, written once for these tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tiny_folder_of: Callable[[str], Path]) -> Path:
    """Read only: tests share it."""
    return tiny_folder_of("ltx_video")


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy that the test may damage."""
    return lambda: Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
