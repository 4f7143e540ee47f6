"""Clients of others against our server, unchanged: LiteLLM, and the one that SGLang's nodes for ComfyUI use.

Each is skipped by name where its package is not installed; `scripts/check_clients` installs both and runs this.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from running_server import RunningServer, running_server

_SGLANG_FILE = "ComfyUI_SGLDiffusion/core/server_api.py"
KEY = "sk-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "key").write_text(f"{KEY}\n")
    keys = ("--api-key-file", str(folder / "key"), "--admin-key-file", str(folder / "key"))
    with running_server(folder / "storage", *keys, "--named-lora", "quick=emoji-fast") as server:
        yield server


# Of the module, and before `server` in each test: none is started where a package is missing.
@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield importlib.import_module("litellm")


@pytest.fixture(scope="module")
def sglang() -> Any:
    """The module of the file, which needs nothing else of its package."""
    try:
        files = importlib.metadata.files("sglang") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("sglang is not installed")
    path = next(file.locate() for file in files if str(file).endswith(_SGLANG_FILE))
    spec = importlib.util.spec_from_file_location("sglang_server_api", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_litellm_makes_images_and_videos(litellm: Any, server: RunningServer) -> None:
    address = {"api_base": f"{server.address}/v1", "api_key": KEY}
    options = {"size": "64x64", "extra_body": {"num_inference_steps": 2, "seed": 7}}
    answer = litellm.image_generation(prompt="a ring", model="openai/emoji", n=2, **options, **address)
    pictures = [Image.open(io.BytesIO(base64.b64decode(each.b64_json))) for each in answer.data]
    assert {(picture.format, picture.size) for picture in pictures} == {("PNG", (64, 64))}
    video = litellm.video_generation(
        prompt="a ring",
        model="hosted_vllm/emoji",
        size="64x64",
        extra_body={"num_frames": 5, "num_inference_steps": 2, "attention": {"default": {"backend": "torch_sdpa"}}},
        **address,
    )
    while video.status in ("queued", "in_progress"):
        video = litellm.video_status(video_id=video.id, **address)
    assert (video.status, video.progress) == ("completed", 100), video
    assert litellm.video_content(video_id=video.id, **address)[4:8] == b"ftyp"


def test_sglangs_client_for_comfyui_makes_images_and_videos_and_sets_lora(
    sglang: Any, server: RunningServer, tmp_path: Path
) -> None:
    client = sglang.SGLDiffusionServerAPI(server.address, api_key=KEY)
    card = client.get_model_info()
    assert (card["task_type"], card["num_gpus"]) == ("T2V", 1)
    common = {"size": "64x64", "num_inference_steps": 2, "seed": 7}
    image = client.generate_image("a ring", **common)
    # It always asks for noise of the GPU.
    assert "CPU" in image["warnings"][0]
    seen: list[int] = []
    video = {"num_frames": 5, "output_path": str(tmp_path), "progress_callback": seen.append}
    made = client.generate_video("a ring", **common, **video)
    content = Path(made["file_path"]).read_bytes()
    assert (hashlib.sha256(content).hexdigest(), seen[-1]) == (made["sha256"], 100)
    assert client.set_lora("quick", strength=0.5)["active"] == [{"name": "quick", "scale": 0.5}]
    with_lora = client.generate_image("a ring", **common)
    assert client.unset_lora()["active"] == []
    assert with_lora["data"][0]["sha256"] != image["data"][0]["sha256"]
    assert client.generate_image("a ring", **common)["data"][0]["sha256"] == image["data"][0]["sha256"]
    # Ours is a video model that takes no images; the client says so, and nothing was made.
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    with pytest.raises(RuntimeError, match="400"):
        client.generate_image("a ring", image_path=str(tmp_path / "a.png"), **common)
    with pytest.raises(RuntimeError, match="400"):
        client.set_lora("other", lora_path=str(tmp_path / "a.safetensors"))
