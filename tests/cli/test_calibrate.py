"""`calibrate`: a file that `--step-cache magcache` and `teacache` take."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli_support import Command

from diffusion_runtime import GenerationRequest
from diffusion_runtime.cli.calibrate import spectrum_text

ARGUMENTS = ("--height", "32", "--width", "32", "--num-frames", "1", "--num-inference-steps", "9", "--device", "cpu")


def test_a_file_is_written_and_taken(command: Command, tmp_path: Path, tiny_wan_folder: Path) -> None:
    path = tmp_path / "calibration.json"
    model = ("--model-path", str(tiny_wan_folder))
    made = command("calibrate", "a red circle", *model, *ARGUMENTS, "-o", str(path), "--json")
    assert made.code == 0, made.err
    answer = json.loads(made.out)
    assert answer["schema"] == "diffusion_runtime.calibrate/1"
    assert answer["calibration"] == json.loads(path.read_text())
    cache = ("--step-cache", f"magcache:file={path},threshold=10", "-o", str(tmp_path / "out.png"))
    generated = command("generate", "a blue star", *model, *ARGUMENTS, *cache, "--json")
    assert generated.code == 0, generated.err
    [item] = json.loads(generated.out)["items"]
    assert any(row["reused_by"] == ["magcache"] for row in item["attention_report"]["steps"])
    assert answer["calibration"]["spectrum"] is None
    assert answer["calibration"]["prompts"] == ["a red circle"]
    cache = ("--step-cache", f"teacache:file={path},threshold=10,use_ret_steps=true", "-o", str(tmp_path / "tea.png"))
    generated = command("generate", "a blue star", *model, *ARGUMENTS, *cache, "--json")
    assert generated.code == 0, generated.err
    [item] = json.loads(generated.out)["items"]
    assert {row["reused"] for row in item["attention_report"]["steps"]} == {"5-7"}
    again = command("calibrate", "a red circle", *model, *ARGUMENTS, "-o", str(path))
    assert again.code != 0
    assert "exists already" in again.err


def test_the_spectrum_of_the_latents_is_measured_and_taken(
    command: Command, tmp_path: Path, tiny_wan_folder: Path
) -> None:
    model = ("--model-path", str(tiny_wan_folder), "--num-frames", "1", "--num-inference-steps", "9", "--device", "cpu")
    sizes = ("--height", "64", "--width", "96")
    made = command("calibrate", "a red circle", *model, *sizes, "-o", str(tmp_path / "calibration.json"))
    assert made.code == 0, made.err
    # A model with random weights makes noise, whose spectrum is flat.
    spectrum = json.loads((tmp_path / "calibration.json").read_text())["spectrum"]
    assert abs(spectrum["beta"]) < 0.5
    assert spectrum_text(spectrum) in made.err
    # One view for each prompt.
    assert "[1/1] a red circle\n" in made.err
    assert "denoise: step 9/9" in made.err


def test_a_flag_is_printed_only_where_it_would_be_taken() -> None:
    for spectrum in ({"A": 15.96, "beta": 2.022}, {"A": 3.5e-7, "beta": 1e-5}):
        [flag] = re.findall(r"--progressive-resolution (dct:\S+)$", spectrum_text(spectrum))
        assert GenerationRequest("a", progressive_resolution=flag).progressive_resolution == flag
    for beta in (0.0, -0.04):
        said = spectrum_text({"A": 1.9, "beta": beta})
        assert "expected a beta above 0" in said
        assert "dct:" not in said


def test_what_is_missing_is_said(command: Command) -> None:
    for arguments, message in (
        (("-o", "x.json"), "prompt: there is none"),
        (("a red circle",), "--output-path: expected the file to write"),
        (("a red circle", "-o", "no/such/folder/x.json"), "is no folder"),
    ):
        answer = command("calibrate", *arguments)
        assert answer.code != 0
        assert message in answer.err
