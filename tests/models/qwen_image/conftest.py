"""A tiny Qwen-Image folder, written once a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_qwen_image import write_tiny_qwen_image


@pytest.fixture(scope="package")
def tiny_qwen_image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: tests share it."""
    return write_tiny_qwen_image(tmp_path_factory.mktemp("models") / "qwen_image")
