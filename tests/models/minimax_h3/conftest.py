"""Tiny MiniMax-H3 folders, written once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def tiny_minimax_h3_folder(tiny_folder_of: Callable[[str], Path]) -> Path:
    """Read only: tests share it."""
    return tiny_folder_of("minimax_h3")
