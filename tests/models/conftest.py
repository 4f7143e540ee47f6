"""Every family's tiny folder, written once a session; a hub on this machine."""

from __future__ import annotations

import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
from tiny_families import WRITERS

SERVER = Path(__file__).with_name("hub_server.py")


@pytest.fixture(scope="session")
def tiny_folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Call it with a family's name. Read only: tests share what it returns."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = WRITERS[family](tmp_path_factory.mktemp("models") / f"tiny_{family}")
        return folders[family]

    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_wan_folder: Path) -> Iterator[SimpleNamespace]:
    """A hub with owner/tiny, whose revision v1 has other weights, and an empty cache."""
    spec = importlib.util.spec_from_file_location("hub_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path / "hub"
    shutil.copytree(tiny_wan_folder, root / "owner" / "tiny")
    weights = root / "owner" / "tiny" / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
    (weights.parent / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    (root / "owner" / "tiny" / "tiny.safetensors").write_bytes(b"all of it again")
    shutil.copytree(root / "owner" / "tiny", root / "owner" / "tiny@v1")
    module.Hub.root = root
    monkeypatch.setattr(module.Hub, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), module.Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    yield SimpleNamespace(
        requests=module.Hub.requests,
        refused=module.Hub.refused,
        commit_of=module.commit_of,
        cache=tmp_path / "cache",
        root=root,
    )
    server.shutdown()
    server.server_close()
