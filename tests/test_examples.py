"""The examples run as they stand, use the public API alone, and stay short."""

from __future__ import annotations

import ast
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from tables import table
from tiny_pipelines import write_tiny_image_pipeline

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
    """By way of scripts/, with flags in the command's spelling and in that of others."""
    out = tmp_path / "out.mp4"
    monkeypatch.setattr("sys.argv", ["text_to_video.py", "--prompt", "a red circle", "--model", str(small_model)])
    sys.argv += ["--output", str(out), "--attention-config.per_role.cross.backend", "TORCH_NATIVE", "--seed", "1"]
    runpy.run_path(str(EXAMPLES[0].parents[1] / "scripts" / "text_to_video.py"), run_name="__main__")
    told = capsys.readouterr()
    assert told.out == f"{out}\n"
    assert "cross: torch_sdpa" in told.err
    assert "from cli: per_role.cross says torch_sdpa" in told.err
    assert read_media_file(out).num_frames == 5


def test_text_to_image(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.png"
    flags = ("--model", str(small_model), "--seed", "0-1", "--num_inference_steps=1", "--output", str(out))
    run_example("text_to_image", "--prompt", "a star", *flags, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == f"{out}\n{tmp_path / 'out-2.png'}\n"
    assert out.read_bytes() != (tmp_path / "out-2.png").read_bytes()


@table(
    ("flags", "code", "said"),
    [
        (["--no-such-flag"], 2, "No such option: --no-such-flag"),
        (["--attention-backend", "flashmla"], 2, "attention backend 'flashmla' has no counterpart here"),
        (["--trust-remote-code"], 2, "no code of a model folder is run here"),
        (["--height", "x"], 2, "Invalid value for '--height'"),
        (["--seed", "x"], 2, "seed"),
        (["--help"], 0, ""),
    ],
)
def test_wrong_flags_of_a_script_end_it_as_the_command_would(
    flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        diffusion_runtime.parse_flags(flags, prompt="a star")
    assert end.value.code == code
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*requires torchvision")
def test_diffusers_passthrough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = write_tiny_image_pipeline(tmp_path / "model"), tmp_path / "out.png"
    run_example("diffusers_passthrough", str(model), "a star", str(out), monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert told.out == f"{out}\n"
    assert "self: torch_sdpa" in told.err
    assert "attention modules reached: 8 of 8" in told.err
    assert read_media_file(out).num_frames == 1


@pytest.mark.parametrize("name", ["attach_to_your_pipeline", "diffusers_passthrough"])
def test_an_example_without_its_arguments_says_what_to_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as end:
        run_example(name, monkeypatch=monkeypatch)
    assert f"python examples/{name}.py " in str(end.value.code)


@pytest.mark.filterwarnings("ignore:.*requires torchvision")
def test_an_example_says_an_error_in_one_line(
    tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "text_to_video": ("--model", str(tmp_path / "none")),
        "text_to_image": ("--model", str(tmp_path / "none")),
        "diffusers_passthrough": (str(tmp_path / "none"), "a star"),
    }
    for name, given in arguments.items():
        with pytest.raises(SystemExit) as end:
            run_example(name, *given, monkeypatch=monkeypatch)
        assert end.value.code == 1, name
        assert capsys.readouterr().err.startswith("error: there is no model folder"), name


def test_attach_to_your_pipeline(
    tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the pipeline's own size, which is 81 frames of 480 x 832, it would take minutes."""
    from diffusers import WanPipeline

    real_call = WanPipeline.__call__

    def small(self: WanPipeline, *arguments: object, **named: object) -> object:
        return real_call(self, *arguments, **named, height=32, width=32, num_frames=5)

    monkeypatch.setattr(WanPipeline, "__call__", small)
    out = tmp_path / "out.gif"
    run_example("attach_to_your_pipeline", str(tiny_wan_folder), "a star", str(out), "4", monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert told.out.endswith(f"{out}\n")
    assert "self: torch_sdpa (flash) x 8, layers 0-1, steps 0-1" in told.err
    assert "self: sliding_tile_attn" in told.err
    assert "layers 0-1, steps 2-3" in told.err
    assert read_media_file(out).num_frames == 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_use_the_public_api(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) < 40
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("diffusion_runtime"):
            assert node.module == "diffusion_runtime"
            assert {alias.name for alias in node.names} <= set(diffusion_runtime.__all__)


def test_the_notebook_runs_and_shows_its_video_and_its_report() -> None:
    """Cell by cell as Jupyter runs them: the last expression of a cell is what it shows."""
    notebook = json.loads((EXAMPLES[0].parent / "first_video.ipynb").read_text())
    names: dict[str, object] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            shown.append(value._repr_html_())
    assert ["<video" in html for html in shown] == [True, False, False]
    assert "torch_sdpa" in shown[1]
    assert "video_sparse_attn" in shown[2]
    steps = names["steps"]
    assert isinstance(steps, list)
    assert ("denoise", 4) in steps


def test_all_examples_are_here() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "text_to_image",
        "text_to_video",
        "diffusers_passthrough",
        "attach_to_your_pipeline",
    }
