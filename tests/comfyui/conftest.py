"""The nodes with stand-ins of ComfyUI, and a server with the embedded model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, running_server

sys.path.insert(0, str(Path(__file__).parent))
from comfy_stand_in import Recorded, load


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("storage")) as server:
        yield server


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def nodes(recorded: Recorded) -> dict[str, Any]:
    """Our nodes by their identifiers, as ComfyUI finds them."""
    extension = asyncio.run(load(recorded).comfy_entrypoint())
    return {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}
