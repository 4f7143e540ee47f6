"""A tiny LTX-2 folder, written once for these tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_ltx2 import write_tiny_ltx2


@pytest.fixture(scope="session")
def tiny_folder(tiny_folder_of: Callable[[str], Path]) -> Path:
    """Read only: tests share it."""
    return tiny_folder_of("ltx2")


@pytest.fixture(scope="session")
def tiny_folder25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LTX-2.5, with what its folder may have. Read only."""
    return write_tiny_ltx2(tmp_path_factory.mktemp("ltx25") / "model", is_ltx25=True)


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy that the test may damage."""
    return lambda: Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
