"""Tiny FLUX.2 folders, written once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_flux2 import write_tiny_flux2_klein


@pytest.fixture(scope="package")
def tiny_flux2_folder(tiny_folder_of: Callable[[str], Path]) -> Path:
    """As [dev]. Read only: tests share it."""
    return tiny_folder_of("flux2")


@pytest.fixture(scope="package")
def tiny_klein_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As [klein] before distillation. Read only: tests share it."""
    return write_tiny_flux2_klein(tmp_path_factory.mktemp("models") / "klein")
