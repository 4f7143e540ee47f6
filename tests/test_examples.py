"""The examples run as they stand, use the public API alone, and stay short."""

from __future__ import annotations

import ast
import json
import runpy
import shutil
from pathlib import Path

import pytest

import diffusion_runtime
from diffusion_runtime.media import read_media_file

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SIZES = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}


@pytest.fixture
def small_model(tiny_wan_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with sizes of its own, as the embedded one has."""
    folder = Path(shutil.copytree(tiny_wan_folder, tmp_path / "model"))
    (folder / "generation.json").write_text(json.dumps({"defaults": SIZES}))
    return folder


def run_example(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(path for path in EXAMPLES if path.stem == name)
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")


def test_text_to_video(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.mp4"
    run_example("text_to_video", "a red circle", str(out), str(small_model), monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert told.out == f"{out}\n"
    assert "cross: torch_sdpa" in told.err
    assert read_media_file(out).num_frames == 5


def test_text_to_image(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.png"
    run_example("text_to_image", "a star", str(out), str(small_model), monkeypatch=monkeypatch)
    assert capsys.readouterr().out == f"{out}\n{tmp_path / 'out-2.png'}\n"
    assert out.read_bytes() != (tmp_path / "out-2.png").read_bytes()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_use_the_public_api(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) < 40
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("diffusion_runtime"):
            assert node.module == "diffusion_runtime"
            assert {alias.name for alias in node.names} <= set(diffusion_runtime.__all__)


def test_both_examples_are_here() -> None:
    assert {path.stem for path in EXAMPLES} >= {"text_to_image", "text_to_video"}
