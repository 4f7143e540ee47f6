"""A published model from files of its sizes: the command finds the parts, and nothing of the hub is needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cli_support import Command
from published_files import write_part_file, write_transformer_file

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.models.found_files import is_all_in_files, with_found_files


@pytest.fixture
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_published_model_from_files_alone(nothing_cached: None, tmp_path: Path, command: Command) -> None:
    """From ComfyUI's folders, without the hub: the autoencoder of Qwen-Image has the same tensors, and another name;
    the tokenizer is in the text encoder's file."""
    models = tmp_path / "models"
    file = write_transformer_file(models / "diffusion_models" / "wan2.1_t2v_1.3B_fp16.safetensors", "wan2.1-1.3b")
    for name in ("wan_2.1_vae", "qwen_image_vae"):
        write_part_file(models / "vae" / f"{name}.safetensors", "wan2.1-1.3b", "vae")
    encoder = models / "text_encoders" / "umt5_xxl_fp16.safetensors"
    write_part_file(encoder, "wan2.1-1.3b", "text_encoder")
    words = ("generate", "a cat", file, "--device", "cpu", "--dtype", "bfloat16", "--dry-run")
    refused = command(*map(str, words))
    assert "tokenizer: wan2.1-1.3b needs it" in refused.said
    write_part_file(encoder, "wan2.1-1.3b", "text_encoder", spiece_model=1000)
    shown = command(*map(str, words), "--json")
    assert shown.code == 0, shown.err
    assert shown.json["download_gb"] == 0
    said = command(*map(str, words))
    for text in (
        "recognised as wan2.1-1.3b by its tensors",
        "wan_2.1_vae.safetensors, 254 MB",
        "umt5_xxl_fp16.safetensors",
    ):
        assert text in said.said, said.said
    config = with_found_files(RuntimeConfig(str(file)))
    assert is_all_in_files(config)
    assert not is_all_in_files(dataclasses.replace(config, vae_path=None))
    assert (config.model_path, config.offline) == ("wan2.1-1.3b", True)
