"""A tiny Qwen-Image 2.1 folder, written once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def tiny_qwen_image_21_folder(tiny_folder_of: Callable[[str], Path]) -> Path:
    """Read only: tests share it."""
    return tiny_folder_of("qwen_image_21")
