"""Tiny Z-Image folders, written once a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_z_image import write_tiny_z_image


@pytest.fixture(scope="package")
def tiny_z_image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: tests share it."""
    return write_tiny_z_image(tmp_path_factory.mktemp("models") / "z_image")
