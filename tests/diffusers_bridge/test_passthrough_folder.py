"""Folders for a passthrough: what is refused before any weight is read, and what is never read."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.torch import load_file, save_file
from tables import table

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.errors import (
    BackendUnavailableError,
    ConfigError,
    ModelLoadError,
)
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.published import model_of_name

SIZES = {"height": 16, "width": 16, "num_inference_steps": 2}
VIDEO = GenerationRequest(prompt="a red circle", seed=3, num_frames=9, **SIZES)
IMAGE = GenerationRequest(prompt="a red circle", seed=3, negative_prompt="blue", **SIZES)
# What transformers says about image processors when diffusers imports them.
pytestmark = pytest.mark.filterwarnings("ignore:.*requires torchvision")


def test_choices_fail_before_the_weights_are_read(video_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(video_folder, tmp_path / "model"))
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(BackendUnavailableError, match="fa"):
        load_pipeline(str(folder), attention="fa")
    with pytest.raises(ConfigError, match="unknown attention backend"):
        load_pipeline(str(folder), attention="flesh")
    description = inspect_pipeline(RuntimeConfig(model_path=str(folder), attention="reference"))
    assert [(row.role, row.layers, row.decision.backend) for row in description.attention] == [
        ("self", (0, 1), "reference")
    ]
    with pytest.raises(ModelLoadError, match=r"expected model.safetensors"):
        load_pipeline(str(folder), attention="reference")


@table(
    ("change", "told"),
    [
        ({"_class_name": "NoSuchPipeline"}, "has no pipeline 'NoSuchPipeline'"),
        ({"_class_name": None}, "key '_class_name'"),
        ({"_class_name": "x" * 8000}, "has no pipeline 'x{70,80}\\.\\.\\.; a newer"),
        ({"scheduler": ["x" * 8000, "Scheduler"]}, "'x{70,80}\\.\\.\\. is code"),
        ({"transformer": ["diffusers", "x" * 8000]}, "has no 'x{70,80}\\.\\.\\., and there is no native model"),
        ({"_class_name": "UNet2DConditionModel"}, "got 'UNet2DConditionModel', which is another class of diffusers"),
        (
            {"_class_name": "MiniMaxH3ModularPipeline"},
            "'MiniMaxH3ModularPipeline' is a modular pipeline .* the folder has no modular_model_index",
        ),
        ({"scheduler": ["my_code", "Scheduler"]}, "'my_code' is code that comes with the folder"),
        ({"transformer": [None, None]}, "CogVideoXPipeline has no transformer and no UNet among "),
        ({"transformer": ["diffusers", "NoSuchModel"]}, "has no 'NoSuchModel', and there is no native model"),
    ],
)
def test_folders_that_cannot_be_run(video_folder: Path, tmp_path: Path, change: dict[str, Any], told: str) -> None:
    folder = Path(shutil.copytree(video_folder, tmp_path / "model"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(ModelLoadError, match=told):
        load_pipeline(str(folder), backend="diffusers")


@table(
    "method",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "torchao", "quant_type": "int8wo"},
        {"quant_method": "of nobody"},
    ],
)
def test_a_quantised_folder_without_its_package_says_what_to_use(
    video_folder: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    """diffusers loads such folders where the package that made them is installed."""
    folder = Path(shutil.copytree(video_folder, tmp_path / "model"))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": method}))
    name = method["quant_method"]
    told = (
        rf"diffusers cannot load its .*; quantised: transformer \('{name}'\). Install the package that made them, or "
    )
    with pytest.raises(ModelLoadError, match=told):
        load_pipeline(str(folder), backend="diffusers", device="cpu")


def test_pickles_are_never_read(image_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(image_folder, tmp_path / "model"))
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelLoadError, match="pickled weights can run code and are never read"):
        load_pipeline(str(folder))


def test_components_that_are_not_there(image_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(image_folder, tmp_path / "model"))
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="cut off after 1000 bytes"):
        load_pipeline(str(folder))
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(ModelLoadError, match="tokenizer is missing; copy or download"):
        load_pipeline(str(folder))


def test_half_precision_files_alone(image_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(image_folder, tmp_path / "model"))
    for path in folder.glob("*/*.safetensors"):
        path.rename(path.with_suffix(".fp16.safetensors"))
    assert numpy.array_equal(load_pipeline(str(folder))(IMAGE).frames, load_pipeline(str(image_folder))(IMAGE).frames)


def test_weights_that_are_in_no_file(image_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(image_folder, tmp_path / "model"))
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["conv_in.bias"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unet: weights are in no file: conv_in.bias. Copy"):
        load_pipeline(str(folder))


def test_what_only_native_models_do_is_refused(image_folder: Path) -> None:
    with pytest.raises(ConfigError, match="parallel: a pipeline of diffusers' own runs on one process"):
        inspect_pipeline(RuntimeConfig(model_path=str(image_folder), parallel=ParallelConfig(num_gpus=2)))


def test_an_endless_class_name_is_cut(
    video_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the choice between a native model and diffusers' own pipeline."""
    folder = Path(shutil.copytree(video_folder, tmp_path / "model"))
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": "y" * 8000, "transformer": ["diffusers", "x" * 8000]}
    (folder / "model_index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.INFO), pytest.raises(ModelLoadError):
        load_pipeline(str(folder))
    (said,) = [record.getMessage() for record in caplog.records if "no native model" in record.getMessage()]
    assert len(said) < len(str(folder)) + 300


def test_documented_settings_of_a_name_that_are_not_applied_are_named(
    tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffusion_runtime.models.model_sources._download", lambda *_: tiny_wan_folder)
    description = inspect_pipeline(RuntimeConfig("wan2.1-1.3b", backend="diffusers"))
    (said,) = [record.getMessage() for record in caplog.records if "not applied" in record.getMessage()]
    published = model_of_name("wan2.1-1.3b")
    assert published is not None
    for field, value in published.request.items():
        is_applied = description.rules.defaults.get(field) == value
        assert (f" {field} " in said) != is_applied, field
    assert "presets draft" in said
    caplog.clear()
    inspect_pipeline(RuntimeConfig("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", backend="diffusers"))
    assert not [record for record in caplog.records if "not applied" in record.getMessage()]
