"""Tiny FLUX.3 folders, written once a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_flux3 import write_tiny_flux3


@pytest.fixture(scope="package")
def tiny_flow_map(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the distilled one. Read only: tests share it."""
    return write_tiny_flux3(tmp_path_factory.mktemp("models") / "flow_map", flow_map=True)
