"""One server with the embedded model for all tests that need no other: its start is most of their time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import ADMIN, ORIGIN, RunningServer, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "admin"
    keys.write_text(ADMIN["authorization"].removeprefix("Bearer "))
    arguments = ["--named-lora", "quick=emoji-fast", "--admin-key-file", str(keys), "--allow-origin", ORIGIN]
    arguments += ["--max-body", str(2**20), "--allow-url", "allowed.example"]
    with running_server(tmp_path_factory.mktemp("storage"), *arguments) as server:
        yield server
