"""`bench generate`: the table, one JSON object, files, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from cli_support import Command
from tables import table

# As few steps, frames and samples as there can be.
QUICK = ("--device", "cpu", "--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2")


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured here is for no later plan."""
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_stages_cold_and_warm_beside_diffusers(command: Command, tiny_wan_folder: Path) -> None:
    shown = command("bench", "generate", tiny_wan_folder, *QUICK, "--repeats", "1")
    assert shown.code == 0
    assert "5 frames of 32 x 32, 2 steps" in " ".join(shown.out.split())
    lines = shown.out.splitlines()
    for name in ("ours, cold", "ours, warm", "diffusers, cold", "diffusers, warm"):
        figures = next(line for line in lines if line.startswith(name)).removeprefix(name).split()
        text, denoise, per_step, decode, write, together = map(float, figures[:6])
        assert per_step == pytest.approx(denoise / 2, abs=0.001)
        assert together == pytest.approx(text + denoise + decode + write, abs=0.003)
        assert (figures[6] == "-") == name.endswith("warm")
    assert max(map(len, lines[2:])) <= 80


def test_one_object_and_files(command: Command, tiny_wan_folder: Path, tmp_path: Path) -> None:
    path, picture = tmp_path / "new" / "generate.json", tmp_path / "generate.png"
    flags = ("--no-diffusers", "--json", "--quiet", "-o", path, "--plot", picture, "--repeats", "2")
    shown = command("bench", "generate", tiny_wan_folder, *QUICK, *flags)
    assert (shown.code, shown.err) == (0, "")
    result = json.loads(shown.out)
    assert result == json.loads(path.read_text())
    assert result["schema"] == "diffusion_runtime.bench_generate/1"
    (row,) = result["rows"]
    assert (row["name"], row["state"], len(row["runs"])) == ("ours", "measured", 3)
    assert row["cold_s"] == row["runs"][0]
    assert list(row["warm_s"]) == ["text", "denoise", "decode", "write"]
    first, second = (run["denoise"] for run in row["runs"][1:])
    assert row["warm_s"]["denoise"] == pytest.approx((first + second) / 2)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["generate.png", "new"]


def test_ours_has_the_settings_of_generate(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "generate.json"
    sparse = ("--attention-backend", "sol_attn", "--attention-backend-config", "top_k=0.5")
    flags = (*sparse, "--quantization", "fp8", "--cuda-graphs", "off", "--no-diffusers", "--repeats", "1", "-o", path)
    shown = command("bench", "generate", "shapes", *QUICK, *flags)
    assert shown.code == 0
    result = json.loads(path.read_text())
    assert result["settings"] == {
        "lora": [],
        "attention_override": {"default": {"backend": "sol_attn", "extra": {"top_k": 0.5}}},
        "quantization": "fp8",
        "cuda_graphs": "off",
        "offload": "auto",
        "memory_limit": None,
        "vae_decode": "exact",
    }
    (row,) = result["rows"]
    assert any("sol_attn" in line for line in row["ran"])
    assert any(line.startswith("quantised linear layers: ") for line in row["ran"])
    assert "quantised linear layers: " in shown.out


def test_what_a_plan_advises_is_measured_for_it(command: Command, tiny_wan_folder: Path) -> None:
    same = ("--num-frames", "9", "--context-frames", "5", "--vae-decode", "fast")
    planned = ("generate", "a star", "--model-path", tiny_wan_folder, *QUICK[:6], *QUICK[8:], *same, "--dry-run")
    advice = command(*planned, "--json").json["items"][0]["expected_time"]["advice"]
    words = shlex.split(advice.partition(", with")[0])
    assert words[:3] == ["diffusion-runtime", "bench", "generate"]
    assert {"request.context_frames=5", "runtime.vae_decode=fast"} <= set(words)
    shown = command(*words[1:], "--device", "cpu", *QUICK[8:], "--repeats", "1")
    assert shown.code == 0, shown.err
    assert command(*planned, "--json").json["items"][0]["expected_time"]["advice"] == ""
    refused = command("bench", "generate", "shapes", "--set", "request.seed=3")
    assert (refused.code, "--set request.seed: a benchmark has one of its own" in refused.said) == (2, True)


def test_a_preset_brings_its_lora_along(command: Command) -> None:
    flags = (*QUICK[:-2], "--preset", "fast", "--no-diffusers", "--repeats", "1", "--json")
    shown = command("bench", "generate", "emoji", *flags)
    assert shown.code == 0, shown.err
    [lora] = shown.json["settings"]["lora"]
    assert lora["path"] == "emoji-fast"
    assert shown.json["request"]["num_inference_steps"] == 4
    assert any("the LoRA emoji-fast" in line for line in shown.json["rows"][0]["ran"])


@pytest.mark.slow
def test_without_ffmpeg_the_frames_alone_are_written(
    command: Command, tiny_wan_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("bench", "generate", tiny_wan_folder, *QUICK, "--repeats", "1", "--json")
    result = command(*words).json
    assert (result["file_format"], result["remarks"]) == ("mp4", [])
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    shown = command(*words)
    assert shown.code == 0, shown.err
    assert [row["state"] for row in shown.json["rows"]] == ["measured", "measured"]
    assert all("write" in row["warm_s"] for row in shown.json["rows"])
    assert shown.json["file_format"] == "npy"
    assert shown.json["remarks"] == [
        "write is of npy, not of mp4: there is no ffmpeg here (pip install imageio-ffmpeg)"
    ]
    assert command(*words[:-1], "--num-frames", "1", "--no-diffusers", "--json").json["file_format"] == "png"


REFUSALS = {
    "options without their form": (
        ("shapes", "--attention-backend-config", "0.5"),
        "--attention-backend-config: expected key=value",
    ),
    "graphs without a GPU": (("shapes", "--cuda-graphs", "on"), "cuda_graphs: on: forward passes of this model cannot"),
    "random weights that wait": (("flux.1-dev", "--offload", "layers"), "--offload layers: the random weights of"),
    "a limit for random weights": (("flux.1-dev", "--memory-limit", "8GB"), "--memory-limit: the random weights of"),
    "an unknown model": (("flux.1-def",), "neither a folder nor a published model. Did you mean 'flux.1-dev'"),
    "the beginning of a model": (("moss",), "Did you mean 'moss-image-base' or 'moss-image-sft'? Expected a name that"),
    "nothing like a model": (("none",), "nor a published model. Expected a name that `diffusion-runtime models` lists"),
    "an unknown preset": (("shapes", "--preset", "fats"), "fats"),
    "a size between": (("shapes", "--height", "65"), "height: expected a multiple of 16, got 65"),
    "a plot that is none": (("shapes", "--plot", "it.txt"), "--plot: expected a file that ends in"),
}


@table(("flags", "said"), REFUSALS.values(), REFUSALS)
def test_what_is_refused(flags: tuple[str, ...], said: str, command: Command) -> None:
    shown = command("bench", "generate", "--device", "cpu", *flags)
    assert shown.code == 2
    assert said in shown.said
    assert shown.out == ""
