"""Tiny pipeline folders, written once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_pipelines import write_tiny_image_pipeline, write_tiny_video_pipeline


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_video_pipeline(tmp_path_factory.mktemp("pipelines") / "video")


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_image_pipeline(tmp_path_factory.mktemp("pipelines") / "image")


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> Iterator[None]:
    """For models so small that threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)
