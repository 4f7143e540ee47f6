"""A published model from files of its sizes: the command finds the parts, and nothing of the hub is needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cli_support import Command
from published_files import write_part_file, write_transformer_file
from spiece_files import model_bytes

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.found_files import is_all_in_files, with_found_files
from diffusion_runtime.models.memory_demand import StepDemand


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
