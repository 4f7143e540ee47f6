"""Tiny FLUX.1 folders, written once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_flux1 import write_tiny_flux1


@pytest.fixture(scope="package")
def tiny_flux1_folder(tiny_folder_of: Callable[[str], Path]) -> Path:
    """As [dev]: guidance is an input, the shift grows with the tokens. Read only: tests share it."""
    return tiny_folder_of("flux1")


@pytest.fixture(scope="package")
def tiny_flux1_schnell_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As [schnell]: neither. Read only: tests share it."""
    folder = tmp_path_factory.mktemp("models") / "flux1_schnell"
    return write_tiny_flux1(folder, embeds_guidance=False, shifts_by_size=False)
