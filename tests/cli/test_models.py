"""`models`: what runs natively and what it needs."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import REPOSITORY, Command, process_environment

from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
from diffusion_runtime.models.published import PublishedModel, published_models
from diffusion_runtime.models.sampling_presets import sampling_presets


def test_the_table_fits_a_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command("models")
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    rows = shown.out.splitlines()
    for model in published_models():
        # Side by side, whatever the longest path is.
        row, below = next(pair for pair in itertools.pairwise(rows) if f" {model.model_path} " in pair[0])
        assert re.fullmatch(r".* [\d.]+ [GM]B +[\d.]+ [GM]B *", row)
        from_elsewhere = "files of yours" if model.files_alone else "download"
        assert (from_elsewhere if model.download_gb else "inside") in below
    assert all(preset.name in shown.out for preset in sampling_presets())


def test_json_says_what_each_needs(command: Command) -> None:
    answer = json.loads(command("models", "--json").out)
    assert answer["schema"] == "diffusion_runtime.models/1"
    assert "WanTransformer3DModel" in answer["transformer_classes"]
    row = next(row for row in answer["models"] if row["name"] == "wan2.2-t2v-a14b")
    assert row["weights_gb"]["float32"] == 2 * row["weights_gb"]["bfloat16"]
    assert {"draft", "lightning-4", "turbowan-4"} <= set(row["presets"])
    # A preset of a single model.
    assert [row["name"] for row in answer["models"] if "fast" in row["presets"]] == ["emoji"]
    # Of the embedded models, what `--preset` takes: no published few-step model has their numbers of steps.
    embedded = {row["name"]: row["presets"] for row in answer["models"] if row["model_path"] == row["name"]}
    assert embedded == {
        "shapes": ["draft", "default", "large"],
        "shapes-causal": ["draft", "default"],
        "emoji": ["draft", "default", "fast"],
    }
    (lightning,) = [
        preset for preset in answer["sampling_presets"] if (preset["family"], preset["name"]) == ("wan", "lightning-4")
    ]
    assert lightning["request"]["sigmas_before_shift"] == [1.0, 0.75, 0.5, 0.25]
    # One expert and the decoder, where the other and the text encoder wait.
    assert row["offloaded_gb"]["bfloat16"] == pytest.approx(2 * (14.289 + 0.127))
    needs = {row["name"]: row["images"] for row in answer["models"]}
    assert needs["wan2.2-i2v-a14b"] == {"image_path": "needed", "last_image_path": "optional"}
    assert needs["flux.1-dev"] == {}
    assert row["parameters"]["transformer_2"] == row["parameters"]["transformer"] == 14_289_000_000


def test_upsamplers_and_controlnets_are_listed_with_the_models_that_take_them(command: Command) -> None:
    """By the classes that the families load."""
    shown = command("models").out
    parts = {row["name"]: row["parts"] for row in json.loads(command("models", "--json").out)["models"]}
    for model in published_models():
        family = importlib.import_module(f"diffusion_runtime.models.{model.family}.family").FAMILY
        stage = family.requests.second_stage
        # The published upsampler of LTX-Video is of the latents of 0.9.7; these have other autoencoders.
        is_older = model.name in ("ltx-video-0.9.0", "ltx-video-0.9.1")
        expected = {} if stage is None or is_older else {"upsampler_path": stage.upsampler.class_name}
        if model.name == "qwen-image":
            expected = {"controlnet_path": family.files.controlnet_class}
        assert parts[model.name] == model.parts == expected
    assert "takes --upsampler-path (LTX2LatentUpsamplerModel)" in shown
    assert "takes --controlnet-path (QwenImageControlNetModel)" in shown


def test_no_torch_is_imported() -> None:
    code = "import sys; from diffusion_runtime.models.published import published_models; published_models(); "
    code += "from diffusion_runtime.models.sampling_presets import sampling_presets; sampling_presets(); "
    finished = subprocess.run(
        [sys.executable, "-c", f"{code} print('torch' in sys.modules)"],
        env=process_environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert finished.stdout.strip() == "False"


def test_configs_are_made_from_what_the_package_knows() -> None:
    texts = runpy.run_path(str(REPOSITORY / "scripts" / "write_configs.py"))["config_texts"]()
    files = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "configs").iterdir()}
    assert files == texts, "run: python scripts/write_configs.py"
    assert set(files) == {f"{model.name}.yaml" for model in published_models()}


@pytest.mark.parametrize("name", EMBEDDED_FOLDERS)
def test_the_embedded_models_numbers_are_their_files(name: str) -> None:
    model = next(model for model in published_models() if model.model_path == name)
    for component, billions in model.parameters:
        assert billions == pytest.approx(1e-9 * _num_stored(EMBEDDED_FOLDERS[name] / component), rel=0.02)


def _num_stored(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def test_sizes_follow_from_the_parameters() -> None:
    model = PublishedModel("x", "x", "owner/x", "video", (("transformer", 2.0), ("vae", 0.5)), stored_bytes=4)
    assert model.download_gb == 10.0
    assert (model.memory_gb("bfloat16"), model.memory_gb("float32")) == (5.0, 10.0)
