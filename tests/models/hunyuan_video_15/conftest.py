"""Tiny HunyuanVideo-1.5 folders, each written once for these tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_hunyuan_video_15 import write_tiny_hunyuan_video_15


@pytest.fixture(scope="session")
def text_to_video(tiny_folder_of: Callable[[str], Path]) -> Path:
    """Read only: tests share it."""
    return tiny_folder_of("hunyuan_video_15")


@pytest.fixture(scope="session")
def image_to_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: tests share it."""
    return write_tiny_hunyuan_video_15(tmp_path_factory.mktemp("models") / "image_to_video", starts_from_image=True)


@pytest.fixture
def tiny_copy(image_to_video: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy of the image-to-video folder that the test may damage."""
    return lambda: Path(shutil.copytree(image_to_video, tmp_path / "copy"))
