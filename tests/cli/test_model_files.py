"""A published model from files of its sizes: the command finds the parts, and nothing of the hub is needed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli_support import Command
from fenced_blocks import blocks
from published_files import write_part_file, write_transformer_file
from spiece_files import model_bytes
from tiny_models import write_tiny_wan

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models import published_folders
from diffusion_runtime.models.found_files import is_all_in_files, with_found_files
from diffusion_runtime.models.memory_demand import StepDemand
from diffusion_runtime.models.published import model_of_name


@pytest.fixture
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    # Counting the bytes of a step takes seconds, and is tested elsewhere.
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.step_demand", lambda *_: StepDemand(10**9, 0))
    monkeypatch.setattr("diffusion_runtime.models.memory_demand.decoding_bytes", lambda *_, **__: 10**9)


def test_a_published_model_from_files_alone(nothing_cached: None, tmp_path: Path, command: Command) -> None:
    """From ComfyUI's folders, without the hub: the autoencoder of Qwen-Image has the same tensors, and another name;
    the tokenizer is in the text encoder's file."""
    models = tmp_path / "models"
    file = write_transformer_file(models / "diffusion_models" / "wan2.1_t2v_1.3B_fp16.safetensors", "wan2.1-1.3b")
    encoder = models / "text_encoders" / "umt5_xxl_fp16.safetensors"
    write_part_file(encoder, "wan2.1-1.3b", "text_encoder")
    write_part_file(models / "vae" / "qwen_image_vae.safetensors", "wan2.1-1.3b", "vae")
    facts = " ".join(command("info", str(file)).out.split())
    assert "model wan2.1-1.3b, by its tensors run it diffusion-runtime generate" in facts
    with pytest.raises(ModelLoadError, match=r"missing:\n  vae, 0.3 GB in bfloat16: wan_2.1_vae.safetensors"):
        with_found_files(RuntimeConfig(str(file)))
    write_part_file(models / "vae" / "wan_2.1_vae.safetensors", "wan2.1-1.3b", "vae")
    with pytest.raises(ModelLoadError, match=r"^tokenizer: .*google/umt5-xxl.*--download"):
        with_found_files(RuntimeConfig(str(file)))
    damaged = write_part_file(encoder, "wan2.1-1.3b", "text_encoder", spiece_model=b"none")
    with pytest.raises(
        ModelLoadError, match=rf"(?s)text_encoder, 11.4 GB.*not {damaged}: tensor spiece_model: no Sent"
    ):
        with_found_files(RuntimeConfig(str(file)))
    pieces = model_bytes([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -1.0)])
    write_part_file(encoder, "wan2.1-1.3b", "text_encoder", spiece_model=pieces + bytes(len(pieces) % 2))
    shown = command("generate", "a cat", str(file), "--device", "cpu", "--dtype", "bfloat16", "--dry-run")
    assert shown.code == 0, shown.err
    for text in ("recognised as wan2.1-1.3b by its tensors", "wan_2.1_vae.safetensors, 254 MB", str(encoder)):
        assert text in shown.said, shown.said
    config = with_found_files(RuntimeConfig(str(file)))
    assert (config.model_path, config.offline, is_all_in_files(config)) == ("wan2.1-1.3b", True, True)
    assert not is_all_in_files(dataclasses.replace(config, vae_path=None))


@pytest.fixture
def tiny_a14b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ComfyUI's folders of a tiny Wan 2.2 with two experts, in an empty folder; the published
    model of that name has these sizes, and requests of two steps."""
    folder = write_tiny_wan(tmp_path / "whole", boundary_ratio=0.875)
    model = model_of_name("wan2.2-t2v-a14b")
    assert model is not None
    files = {
        str(path.relative_to(folder)): json.loads(path.read_text())
        for path in folder.rglob("*.json")
        if path.name != "tokenizer.json"
    }
    name = model.model_path.rpartition("/")[2]
    published_folders.write_folder(tmp_path / "configs" / name, files)
    known = {**published_folders.published_folders(), name: files}
    theirs, ours = published_folders._temporary_folder, SimpleNamespace(name=str(tmp_path / "configs"))
    monkeypatch.setattr(published_folders, "published_folders", lambda: known)
    monkeypatch.setattr(
        published_folders, "_temporary_folder", lambda wanted: ours if wanted == name else theirs(wanted)
    )
    small = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "negative_prompt": ""}
    for key, value in small.items():
        monkeypatch.setitem(cast("dict[str, Any]", model.request), key, value)
    cached = tmp_path / "hub" / "models--google--umt5-xxl" / "snapshots" / ("0" * 40)
    shutil.copytree(folder / "tokenizer", cached)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "new"
    for component, file in (
        ("transformer", "diffusion_models/wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors"),
        ("transformer_2", "diffusion_models/wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors"),
        ("text_encoder", "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors"),
        ("vae", "vae/wan_2.1_vae.safetensors"),
    ):
        path = place / "ComfyUI" / "models" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next((folder / component).glob("*.safetensors")), path)
    return place


def test_the_commands_of_the_page_as_they_stand(
    tiny_a14b: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_a14b)
    page = next(each for each in blocks("bash") if each.document.name == "your_files.md")
    lines = [words[1:] for words in page.command_lines()]
    assert [words[0] for words in lines] == ["info", "generate", "generate"]
    info, plan, run = (command(*words, *(("--device", "cpu") if words[0] != "info" else ())) for words in lines)
    assert [each.code for each in (info, plan, run)] == [0, 0, 0], run.err
    assert "wan2.2-t2v-a14b" in info.out
    for said in (plan.said, run.said):
        assert "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors" in said
        assert "recognised as wan2.2-t2v-a14b" in said
    (video,) = tiny_a14b.rglob("*.mp4")
    recipe = json.loads(video.with_suffix(".json").read_text())["recipe"]
    assert (
        recipe["weights"].keys()
        == {"transformer_path", "transformer_2_path", "text_encoder_path", "vae_path"}
        == recipe["weight_bytes"].keys()
    )
