"""`generate --workflow` of ComfyUI's own templates, from tiny random files with the names and number formats that their
nodes name: planned, and some really generated."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from workflows.tiny_files import use_as_published, write_files, write_inputs, writer_of

from diffusion_runtime.cli.app import run
from diffusion_runtime.models.memory_demand import StepDemand
from diffusion_runtime.workflows.coverage import cover
from diffusion_runtime.workflows.reading import read_workflow
from diffusion_runtime.workflows.translation import Translation, translate

pytestmark = pytest.mark.filterwarnings("ignore")
PLANNED = ("image_z_image_turbo_int8", "video_ltx2_3_i2v")
# Which cannot run as they are, and what is said: a prompt that is left to the user; no file of the sound's autoencoder,
# in a template of an image with a height of 728.
REFUSED = {
    "video_minimax_h3_i2v_continuation": "expected at least one word",
    "image_minimax_h3_t2i": "parts of minimax-h3 are missing:\\n  audio_vae",
}
# Sizes of those that are generated, from their own pictures' proportions; MiniMax-H3 makes 17 n + 5 frames.
GENERATED = {
    "image_z_image_turbo": ("--width=64", "--height=64"),
    "video_wan2_2_14B_i2v": ("--width=64", "--height=64", "--num-frames=5"),
    "video_ltx2_3_i2v": ("--width=320", "--height=192", "--num-frames=9"),
    "video_ltx2_5_i2v": ("--width=320", "--height=192", "--num-frames=9"),
    "image_flux2_klein_text_to_image": ("--width=64", "--height=64"),
    "video_minimax_h3_t2v": ("--width=64", "--height=64", "--num-frames=22"),
}


@pytest.fixture(scope="module")
def templates() -> Path:
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "templates"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of tiny models, by published name."""
    return tmp_path_factory.mktemp("models")


def generate(template: Path, folders: Path, place: Path, *flags: str) -> int:
    """Run a template from files in `place`; return the command's exit code."""
    found = translate(read_workflow(str(template)))
    assert isinstance(found, Translation)
    name, models = found.model.name, place / "models"
    if not (folders / name).exists():
        writer_of(name)(folders / name)
    write_files(found, folders / name, models)
    write_inputs(found, place / "input")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_as_published(name, folders / name, monkeypatch)
        # Counting the bytes of a step takes seconds, and is tested elsewhere.
        monkeypatch.setattr("diffusion_runtime.models.memory_demand.step_demand", lambda *_: StepDemand(10**9, 0))
        monkeypatch.setattr("diffusion_runtime.models.memory_demand.decoding_bytes", lambda *_, **__: 10**9)
        line = ("--workflow", str(template), "--models-dir", str(models), "--device", "cpu", *flags)
        return run(["generate", *line])


@pytest.mark.parametrize(
    "names", [PLANNED, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "every one that is translated"]
)
def test_templates_are_planned_from_files_of_the_named_kinds(
    names: tuple[str, ...] | None,
    templates: Path,
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row.name for row in cover(str(templates)).rows if row.reason is None] if names is None else names
    refused = {}
    for name in rows:
        code = generate(templates / f"{name}.json", folders, tmp_path / name, "--dry-run", "--json")
        answer = json.loads(capsys.readouterr().out)
        if code != 0:
            refused[name] = answer["error"]
            continue
        (item,) = answer["items"]
        assert item["request"]["prompt"]
        # Every part is of the workflow's folders, and nothing of the hub.
        assert answer["folder"] is None
        # Of LTX-2.5 the head that predicts a length, which is in no file of ComfyUI's.
        assert answer["download_gb"] <= (0.01 if "ltx2_5" in name else 0), name
        paths = [value for key, value in answer["runtime"].items() if key.endswith("_path") and key != "model_path"]
        assert sum(path is not None and Path(path).is_relative_to(tmp_path / name) for path in paths) >= 3, name
    if names is None:
        assert refused.keys() == REFUSED.keys(), refused
    assert all(REFUSED[name].replace("\\n", "\n") in reason for name, reason in refused.items()), refused


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "image_z_image_turbo" else pytest.mark.slow) for name in GENERATED],
)
def test_templates_are_generated_from_files_of_the_named_kinds(
    name: str, templates: Path, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / ("out.png" if name.startswith("image") else "out.mp4")
    flags = (*GENERATED[name], "--output-path", str(output))
    assert generate(templates / f"{name}.json", folders, tmp_path, *flags) == 0, capsys.readouterr().err
    recipe = json.loads(output.with_suffix(".json").read_text())["recipe"]
    assert recipe["request"]["width"] == int(GENERATED[name][0].partition("=")[2])
    assert output.stat().st_size > 100
    if "ltx" in name:
        # An image in part in the first stage, and in full in the second.
        assert recipe["request"]["frame_conditions"][0][2] == 0.7
        assert recipe["request"]["second_stage_strength"] == 1.0
