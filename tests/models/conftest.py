"""Every family's tiny folder, written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_families import WRITERS


@pytest.fixture(scope="session")
def tiny_folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Call it with a family's name. Read only: tests share what it returns."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = WRITERS[family](tmp_path_factory.mktemp("models") / f"tiny_{family}")
        return folders[family]

    return folder
