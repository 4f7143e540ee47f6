"""`generate --workflow`, `workflow explain` and `workflow coverage`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from cli_support import Command
from tables import table
from workflows.comfy_graphs import api_format, z_image

from diffusion_runtime.cli.flag_syntax import is_workflow_path


def written(folder: Path, **changes: Any) -> str:
    path = folder / "w.json"
    path.write_text(json.dumps(z_image(**changes)))
    return str(path)


def test_explain_shows_nodes_and_writes_both_files(command: Command, tmp_path: Path) -> None:
    file = written(tmp_path)
    shown = command("workflow", "explain", file, "a dog", "--set", "8.seed=3", "--json").json
    assert (shown["model"], shown["request"]["prompt"], shown["request"]["seed"]) == ("z-image-turbo", "a dog", 3)
    verdicts = {each["node"]: each["verdict"] for each in shown["nodes"]}
    assert (verdicts["8"], verdicts["20"]) == ("taken", "replaced by")
    assert command("workflow", "explain", file, "--to", str(tmp_path / "mine.yaml")).code == 0
    config = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert config["runtime"] == {"model_path": "z-image-turbo"}
    assert (config["request"]["prompt"], config["request"]["width"]) == (["a cat"], 256)
    assert command("workflow", "explain", file, "--to", str(tmp_path / "api.json")).code == 0
    assert json.loads((tmp_path / "api.json").read_text())["sampler"] == "flow_match_euler"


def test_a_workflow_of_thousands_of_nodes_is_shown_in_part(command: Command, tmp_path: Path) -> None:
    document = api_format(z_image())
    document |= {
        f"{index}": {"class_type": "ModelSamplingSD3", "inputs": {"model": [f"{index - 1}" if index > 100 else "1", 0]}}
        for index in range(100, 1100)
    }
    document["7"]["inputs"]["model"] = ["1099", 0]
    (tmp_path / "long.json").write_text(json.dumps(document))
    found = command("workflow", "explain", str(tmp_path / "long.json"))
    assert found.code == 0
    assert "and 1009 more; --json has all of them" in " ".join(found.out.split())


def test_what_is_not_supported_fails_with_every_reason(command: Command, tmp_path: Path) -> None:
    found = command("workflow", "explain", written(tmp_path, sampler_name="heun"))
    assert found.code == 2
    assert "KSampler (node 8): sampler heun: expected euler" in found.said


def test_generate_takes_the_request_and_flags_come_first(command: Command, tmp_path: Path) -> None:
    """On the embedded model, whose size and steps a workflow of another model may have."""
    line = ["generate", "--workflow", written(tmp_path), "--model-path", "shapes", "--dry-run", "--json"]
    found = command(*line, "--seed", "9", "--num-frames", "1")
    assert found.code == 0, found.said
    request = found.json["items"][0]["request"]
    assert (request["prompt"], request["seed"], request["width"], request["height"]) == ("a cat", 9, 256, 128)
    assert "the files of the workflow are left out" in found.said


def test_generate_names_the_folder_that_is_missing(command: Command, tmp_path: Path) -> None:
    found = command("generate", "--workflow", written(tmp_path), "--dry-run")
    assert found.code == 2
    assert "give --models-dir ComfyUI/models" in found.said
    assert "--model-path z-image-turbo" in found.said


def test_coverage_weighs_by_use(command: Command, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(api_format(z_image())))
    (tmp_path / "bad.json").write_text(json.dumps(z_image(sampler_name="heun")))
    (tmp_path / "index.json").write_text(
        json.dumps(
            [
                {
                    "title": "Image",
                    "templates": [
                        {"name": "good", "usage": 30, "openSource": True},
                        {"name": "bad", "usage": 10, "openSource": True},
                        {"name": "../good", "usage": 99, "openSource": True},
                        {"name": "closed", "usage": 500, "openSource": False},
                    ],
                }
            ]
        )
    )
    found = command("workflow", "coverage", str(tmp_path), "--json").json
    assert (found["uses"], found["translated_uses"], found["lacking"]) == (
        40,
        30,
        {"KSampler": {"uses": 10, "workflows": 1}},
    )
    assert "1 of 2 workflows are translated, 30 of 40 uses (75.0%)" in " ".join(
        command("workflow", "coverage", str(tmp_path)).out.split()
    )


@table("text, expected", [("ref2va", False), ("w.json", True), ("a.PNG", True), ("folder/w", True), ("fl2va", False)])
def test_a_mode_of_a_model_is_no_file(text: str, expected: bool) -> None:
    assert is_workflow_path(text) is expected
