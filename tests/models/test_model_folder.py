"""Where a model is: the embedded one, a folder, a hub id; and what is said when it is nowhere.

The hub is a real server on this machine, asked by a real subprocess: huggingface_hub reads its settings when imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDER, resolve_model_folder

SCRIPT = """
import sys
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.model_sources import resolve_model_folder
try:
    print(resolve_model_folder(sys.argv[1], weights=sys.argv[2] == "weights"))
except ModelLoadError as error:
    print("ModelLoadError:", error)
"""


def resolve_in_subprocess(model: str, tmp_path: Path, hub: str, *, weights: bool = True, offline: bool = False) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": hub,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.getcwd(),
        "NO_PROXY": "127.0.0.1",
    }
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, model, "weights" if weights else "json"],
        env=environment,
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a hub that has one model, owner/tiny."""
    root = tmp_path_factory.mktemp("hub")
    for name in (
        "model_index.json",
        "README.md",
        "wan.safetensors",
        "transformer/config.json",
        "transformer/weights.safetensors",
        "transformer/weights.bin",
        "text_encoder/model-00001-of-00001.safetensors",
        "text_encoder/diffusion_pytorch_model-00001-of-00001.safetensors",
        "tokenizer/spiece.model",
        "tokenizer/merges.txt",
    ):
        path = root / "owner" / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} of the hub")
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "hub_server.py"), str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.terminate()
    server.communicate(timeout=600)


# --- here -------------------------------------------------------------------------------------------------------------


def test_emoji_is_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "emoji").mkdir()
    monkeypatch.chdir(tmp_path)
    if (EMBEDDED_FOLDER / "model_index.json").exists():
        assert resolve_model_folder("emoji") == EMBEDDED_FOLDER
    else:
        with pytest.raises(ModelLoadError, match="install diffusion-runtime again"):
            resolve_model_folder("emoji")


def test_a_folder_is_taken_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (str(folder), "owner/model", "./owner/model", "~/owner/model", "owner/model/"):
        assert resolve_model_folder(text).resolve() == folder.resolve()


def test_a_missing_folder_names_the_nearest_ones_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wan-1.3b").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    for text in ("./wan-1.3", str(tmp_path / "wan-1.3"), "wan-1.3"):
        with pytest.raises(ModelLoadError, match=r"no model folder .*wan-1\.3\. Did you mean 'wan-1\.3b'\?"):
            resolve_model_folder(text)
    for text in ("./zzzzzz", "./flux.1-dev"):
        with pytest.raises(ModelLoadError, match=r"there is: other, wan-1\.3b\."):
            resolve_model_folder(text)
    with pytest.raises(ModelLoadError, match=r"parent .*nowhere does not exist either"):
        resolve_model_folder("./nowhere/model")
    with pytest.raises(ModelLoadError, match=r"there is: no folder\."):
        resolve_model_folder("./other/model")
    # A name that is nearly a published model's, or the beginning of one.
    for text, expected in (
        ("WAN2.1-14B", "'wan2.1-14b'"),
        ("hunyuanvideo-1.5", "'hunyuan-video-1.5-"),
        ("flux-dev", "'flux\\.2-dev' or 'flux\\.1-dev'"),
        ("qwen-image-e", "'qwen-image' or 'qwen-image-edit'"),
        ("qwen", "'qwen-image' or 'qwen-image-2.1'"),
        ("shape", "'shapes'"),
    ):
        with pytest.raises(ModelLoadError, match=rf"no model folder {text}\. Did you mean {expected}"):
            resolve_model_folder(text)


@pytest.mark.parametrize("text", ["/abs/owner/model", "../model", "a/b/c", "owner/mo del", "https://hub/owner/model"])
def test_what_cannot_be_a_hub_id_is_never_looked_up(text: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no model folder"):
        resolve_model_folder(text)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "model_index.json"
    path.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"is a file; give the folder that holds model_index\.json"):
        resolve_model_folder(str(path))


# --- on the hub -------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_downloaded_without_pickles_then_found_without_a_network(tmp_path: Path, hub: str) -> None:
    def names(text: str) -> set[str]:
        folder = Path(text)
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    json_alone = {"model_index.json", "transformer/config.json", "tokenizer/spiece.model", "tokenizer/merges.txt"}
    assert names(resolve_in_subprocess("owner/tiny", tmp_path, hub, weights=False)) == json_alone
    folder = resolve_in_subprocess("owner/tiny", tmp_path, hub)
    weights = {"transformer/weights.safetensors", "text_encoder/model-00001-of-00001.safetensors"}
    assert names(folder) == json_alone | weights
    assert (Path(folder) / "transformer" / "config.json").read_text() == "transformer/config.json of the hub"
    assert resolve_in_subprocess("owner/tiny", tmp_path, hub, offline=True) == folder
    assert resolve_in_subprocess("owner/tiny", tmp_path, "http://127.0.0.1:9") == folder


def test_a_model_the_hub_does_not_have(tmp_path: Path, hub: str) -> None:
    (tmp_path / "elsewhere" / "owner" / "tinier").mkdir(parents=True)
    said = resolve_in_subprocess("owner/tinyer", tmp_path, hub)
    assert said.startswith("ModelLoadError: there is no folder owner/tinyer here and no such model on the hub")
    assert "'emoji' for the embedded model" in said
    assert "Did you mean 'tinier'?" in said


@pytest.mark.parametrize(
    ("offline", "why"),
    [(True, "HF_HUB_OFFLINE is set: unset it"), (False, "the hub cannot be reached: check the network")],
)
def test_a_hub_id_without_a_network_says_what_to_type(tmp_path: Path, offline: bool, why: str) -> None:
    said = resolve_in_subprocess("owner/tiny", tmp_path, "http://127.0.0.1:9", offline=offline)
    assert said.startswith("ModelLoadError: owner/tiny is neither a folder here nor whole in the hub's cache")
    assert why in said
    assert "'emoji' for the embedded model, which needs no network" in said
