"""Every key of published folders is honoured or known to change nothing, and another one ends a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_configs import PUBLISHED, write_published

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.loading import inspect_pipeline

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")

# Read by transformers, which keeps every key.
LIBRARY_FILES = ("text_encoder", "tokenizer", "image_encoder", "feature_extractor")


def dry_run(folder: Path) -> str:
    return inspect_pipeline(RuntimeConfig(str(folder), device="cpu", dtype="bfloat16")).family


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_folder_is_understood(name: str, tmp_path: Path) -> None:
    assert dry_run(write_published(tmp_path, name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_key_that_nobody_knows_ends_a_dry_run(name: str, tmp_path: Path) -> None:
    write_published(tmp_path, name)
    for file, values in PUBLISHED[name].items():
        if file.startswith(LIBRARY_FILES):
            continue
        (tmp_path / file).write_text(json.dumps({**values, "a_key_of_the_future": 1}))
        with pytest.raises(ModelLoadError, match="'a_key_of_the_future'") as caught:
            dry_run(tmp_path)
        assert str(tmp_path / file) in str(caught.value)
        (tmp_path / file).write_text(json.dumps(values))


def test_a_decoder_of_another_class_ends_a_dry_run(tmp_path: Path) -> None:
    write_published(tmp_path, "Z-Image")
    index = {**PUBLISHED["Z-Image"]["model_index.json"], "vae": ["diffusers", "AutoencoderTiny"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="key 'vae': expected AutoencoderKL, got AutoencoderTiny"):
        dry_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("Wan2.1-T2V-1.3B-Diffusers", "WanVideoToVideoPipeline"),
        ("Wan2.1-T2V-1.3B-Diffusers", "WanImageToVideoPipeline"),
        ("HunyuanVideo", "HunyuanVideoImageToVideoPipeline"),
        ("LTX-2", "LTX2ImageToVideoPipeline"),
    ],
)
def test_a_folder_of_another_pipeline_is_refused_with_what_runs_it(name: str, pipeline: str, tmp_path: Path) -> None:
    write_published(tmp_path, name)
    index = {**PUBLISHED[name]["model_index.json"], "_class_name": pipeline}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=rf"key '_class_name'.* got '{pipeline}'.*`--backend diffusers` runs it"):
        dry_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Wan2.1-T2V-1.3B-Diffusers", {"image_dim": 1280, "added_kv_proj_dim": 1536, "in_channels": 36}),
        ("Wan2.2-T2V-A14B-Diffusers", {"in_channels": 36}),
        ("HunyuanVideo", {"in_channels": 33, "image_condition_type": "latent_concat"}),
        ("FLUX.1-dev", {"in_channels": 384, "out_channels": 64}),
        ("FLUX.2-dev", {"in_channels": 256, "out_channels": 128}),
        ("Qwen-Image", {"in_channels": 128}),
    ],
)
def test_a_checkpoint_with_an_image_as_input_is_refused_with_what_runs_it(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    write_published(tmp_path, name)
    values = {**PUBLISHED[name]["transformer/config.json"], **changes}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"transformer/config.json: key.*`--backend diffusers` runs"):
        dry_run(tmp_path)
