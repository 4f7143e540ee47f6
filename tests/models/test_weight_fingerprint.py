"""Whether a weight file is another one than when a recipe was made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy
import pytest

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.models.weight_fingerprint import (
    changed_weights,
    fingerprint,
    folder_fingerprint,
    weight_fingerprints,
)


def write(path: Path, size: int, seed: int = 0) -> Path:
    path.write_bytes(numpy.random.default_rng(seed).bytes(size))
    return path


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    """Not by its name or its time; a large one by its size, its head and pieces of it."""
    for size in (10, 5_000_000):
        first, other = write(tmp_path / "a.safetensors", size), write(tmp_path / "b.safetensors", size, seed=1)
        copy = Path(shutil.copyfile(first, tmp_path / "copy.safetensors"))
        os.utime(copy, (1, 1))
        assert fingerprint(first) == fingerprint(copy) != fingerprint(other)
        assert fingerprint(first) != fingerprint(write(tmp_path / "longer.safetensors", size + 1))
    # The same head.
    content = bytearray(first.read_bytes())
    content[2_000_000:] = numpy.random.default_rng(2).bytes(len(content) - 2_000_000)
    copy.write_bytes(content)
    assert fingerprint(first) != fingerprint(copy)
    assert fingerprint(tmp_path / "none.safetensors") is None


def test_a_folder_is_known_by_its_weight_files(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", 10)
    before = fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("notes")
    assert fingerprint(tmp_path) == before
    write(tmp_path / "b.safetensors", 10)
    assert fingerprint(tmp_path) != before


def test_the_weights_of_a_model_s_folder_are_known(tmp_path: Path) -> None:
    """All that it reads from there, and nothing else."""
    for component in ("transformer", "vae", "notes"):
        (tmp_path / component).mkdir()
    places = [write(tmp_path / name / "a.safetensors", 10) for name in ("transformer", "vae")]
    write(tmp_path / "notes" / "a.txt", 10)
    folder, packaged = ModelFolder(tmp_path), ModelFolder(tmp_path, is_packaged=True)
    before, own = folder_fingerprint(folder, ()), folder_fingerprint(folder, ("vae",))
    write(tmp_path / "notes" / "a.txt", 10, seed=1)
    assert folder_fingerprint(folder, ()) == before
    write(places[1], 10, seed=1)
    assert folder_fingerprint(folder, ()) != before
    assert folder_fingerprint(folder, ("vae",)) == own
    assert folder_fingerprint(packaged, ()) is None
    assert folder_fingerprint(folder, ("vae", "transformer")) is None


def test_an_upsampler_is_known_in_a_folder_of_a_model(tmp_path: Path) -> None:
    """Where the network is read from, whatever lies above it."""
    (tmp_path / "latent_upsampler").mkdir()
    write(tmp_path / "latent_upsampler" / "a.safetensors", 10)
    config = RuntimeConfig("shapes", upsampler_path=str(tmp_path))
    before = weight_fingerprints(config)
    assert before == {"upsampler_path": fingerprint(tmp_path / "latent_upsampler")}
    write(tmp_path / "other.safetensors", 10)
    assert weight_fingerprints(config) == before
    write(tmp_path / "latent_upsampler" / "a.safetensors", 10, seed=1)
    assert weight_fingerprints(config) != before


def test_what_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own", "lora"):
        write(Path(f"{name}.safetensors"), 10)
    config = RuntimeConfig("emoji", transformer_path="own.safetensors", lora=["lora.safetensors", "emoji-fast"])

    def recipe() -> dict[str, object]:
        runtime = {"transformer_path": config.transformer_path, "lora": [{"path": each.path} for each in config.lora]}
        return {"runtime": runtime, "weights": weight_fingerprints(config)}

    then = recipe()
    assert weight_fingerprints(RuntimeConfig("shapes")) == {}
    assert changed_weights(then, recipe()) == ()
    for name in ("own", "lora"):
        write(Path(f"{name}.safetensors"), 10, seed=3)
    assert set(changed_weights(then, recipe())) == {"own.safetensors", "lora.safetensors"}
    # A recipe is a stranger's file.
    for odd in ({}, {"weights": 1, "runtime": []}, {"weights": {"lora": 3}, "runtime": {"lora": [1, {"path": 2}]}}):
        assert changed_weights(odd, recipe()) == ()
