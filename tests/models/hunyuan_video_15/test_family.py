"""The guider and the image encoders of a HunyuanVideo-1.5 folder; what else it may not say is in family_cases."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from family_cases import CONFIG, change
from family_parity import CPU
from tables import table

from diffusion_runtime.attention import AttentionConfig, AttentionPolicy
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import BackendUnavailableError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.hunyuan_video_15.config import read_transformer_config, wide_size
from diffusion_runtime.models.hunyuan_video_15.family import FAMILY
from diffusion_runtime.models.registry import family_for_folder

GUIDER = "guider/guider_config.json"


def defaults_of(folder: Path) -> Any:
    return inspect_pipeline(RuntimeConfig(model_path=str(folder))).rules.defaults


def test_a_sparse_choice_passes_over_the_refiner(text_to_video: Path) -> None:
    model = family_for_folder(text_to_video).describe(text_to_video)
    policy = AttentionPolicy(config=AttentionConfig.parse("video_sparse_attn"))
    layers = model.build_transformer(policy).attention_layers()
    chosen = {layer.layer.role: layer.decisions.possible[0][1].backend for layer in layers}
    assert chosen == {"self": "video_sparse_attn", "hunyuan_video_15.text_refiner": "torch_sdpa"}
    wrong = {"per_role": {"hunyuan_video_15.text_refiner": {"backend": "video_sparse_attn"}}}
    with pytest.raises(BackendUnavailableError, match="video_sparse_attn"):
        model.build_transformer(AttentionPolicy(config=AttentionConfig.parse(wrong)))


# --- the guider and the size ------------------------------------------------------------------------------------------


def test_the_guider_says_the_guidance_scale(tiny_copy: Callable[[], Path]) -> None:
    folder = tiny_copy()
    assert defaults_of(folder)["guidance_scale"] == 3.0
    assert defaults_of(change(folder, GUIDER, {"guidance_scale": 4.5}))["guidance_scale"] == 4.5
    assert defaults_of(change(folder, GUIDER, {"enabled": False}))["guidance_scale"] == 1.0
    assert defaults_of(change(folder, "model_index.json", {"guider": ...}))["guidance_scale"] == 6.0


@pytest.mark.parametrize(
    ("key", "value"),
    [("guidance_rescale", 0.7), ("use_original_formulation", True), ("start", 0.1), ("stop", 0.9), ("enabled", 1)],
)
def test_a_guider_that_does_something_else_is_refused(tiny_copy: Callable[[], Path], key: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"{GUIDER}: key '{key}': expected .*, got "):
        defaults_of(change(tiny_copy(), GUIDER, {key: value}))


def test_a_guider_of_another_kind_or_without_its_file_is_refused(tiny_copy: Callable[[], Path]) -> None:
    folder = tiny_copy()
    (folder / GUIDER).rename(folder / "guider" / "kept.json")
    with pytest.raises(ModelLoadError, match=rf"{GUIDER} is missing"):
        defaults_of(folder)
    other = {"guider": ["diffusers", "AdaptiveProjectedGuidance"]}
    with pytest.raises(ModelLoadError, match="key 'guider': expected ClassifierFreeGuidance, got AdaptiveProjected"):
        defaults_of(change(folder, "model_index.json", other))


@table(("target_size", "size"), [(640, (480, 848)), (960, (720, 1280)), (160, (112, 192))])
def test_the_size_is_the_one_diffusers_takes(target_size: int, size: tuple[int, int]) -> None:
    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    assert wide_size(target_size, 16) == size == processor.calculate_default_height_width(9, 16, target_size)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("image_encoder/config.json", "image_encoder/config.json"),
        ("image_encoder/model.safetensors", "image_encoder"),
        ("feature_extractor/preprocessor_config.json", "preprocessor_config.json"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
    ],
)
def test_a_missing_part_of_the_image_encoders_is_named(tiny_copy: Callable[[], Path], name: str, told: str) -> None:
    folder = tiny_copy()
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=told):
        FAMILY.describe(folder).load_image_conditioner(CPU, torch.float32)


def test_the_pipeline_and_not_the_transformer_says_whether_a_video_starts_from_an_image(
    text_to_video: Path, image_to_video: Path, tmp_path: Path
) -> None:
    """diffusers' conversion writes task_type `i2v` for text to video at 480p, too."""
    for published, starts_from_image in ((text_to_video, False), (image_to_video, True)):
        folder = change(Path(shutil.copytree(published, tmp_path / published.name)), CONFIG, {"task_type": "i2v"})
        model = family_for_folder(folder).describe(folder)
        assert model.inputs.images == ({"image_path": True} if starts_from_image else {})
        assert read_transformer_config(folder).starts_from_image == starts_from_image
