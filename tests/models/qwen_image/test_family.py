"""What a Qwen-Image folder says: every setting that is missing, broken or not for this family, and missing parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from open_fields import OPEN_FIELDS

from diffusion_runtime import load_pipeline
from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.qwen_image.family import FAMILY
from diffusion_runtime.request import GenerationRequest

CPU = torch.device("cpu")


@pytest.fixture
def copy(tiny_qwen_image_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy of the tiny folder that the test may damage."""
    return lambda: Path(shutil.copytree(tiny_qwen_image_folder, tmp_path / "damaged"))


def change(folder: Path, name: str, values: dict[str, Any]) -> Path:
    """Set keys of a json file; a value of None takes the key out."""
    path = folder / name
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def build(folder: Path) -> None:
    FAMILY.describe(folder).build_transformer(AttentionPolicy())


def test_json_alone_is_enough_to_build(copy: Callable[[], Path]) -> None:
    folder = copy()
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    geometry = FAMILY.describe(folder).geometry
    assert (geometry.num_channels, geometry.spatial_factor, geometry.patch) == (4, 4, (1, 2, 2))
    build(folder)


def test_the_defaults_complete_a_request_but_for_the_shift(tiny_qwen_image_folder: Path) -> None:
    defaults = FAMILY.describe(tiny_qwen_image_folder).defaults
    request = GenerationRequest(prompt="a cat").with_defaults(defaults)
    open_fields = {name for name, value in request.to_dict().items() if value is None}
    assert open_fields == OPEN_FIELDS | {"flow_shift"}


@pytest.mark.parametrize("key", ["patch_size", "in_channels", "out_channels", "num_layers", "joint_attention_dim"])
def test_a_missing_key_is_named(copy: Callable[[], Path], key: str) -> None:
    folder = change(copy(), "transformer/config.json", {key: None})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key '{key}' is missing"):
        build(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 1),
        ("num_layers", 0),
        ("axes_dims_rope", [4, 6, 8]),
        ("axes_dims_rope", [5, 5, 6]),
        ("guidance_embeds", True),
        ("zero_cond_t", True),
        ("use_additional_t_cond", True),
        ("use_layer3d_rope", True),
    ],
)
def test_a_value_that_does_not_fit_is_named(copy: Callable[[], Path], key: str, value: object) -> None:
    folder = change(copy(), "transformer/config.json", {key: value})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key '{key}': expected .*, got "):
        build(folder)


def test_checkpoints_of_other_tasks_are_refused(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "transformer/config.json", {"in_channels": 32})
    with pytest.raises(ModelLoadError, match=r"'in_channels' \(32\) and 'out_channels' \(4\)"):
        build(folder)
    folder = change(folder, "transformer/config.json", {"in_channels": 16, "num_experts": 2})
    with pytest.raises(ModelLoadError, match="'num_experts' is unknown"):
        build(folder)


def test_pipelines_of_other_tasks_are_refused(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "model_index.json", {"_class_name": "QwenImageEditPipeline"})
    with pytest.raises(ModelLoadError, match=r"model_index.json: key '_class_name': expected QwenImagePipeline, got"):
        FAMILY.check(folder)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("z_dim", 16, "key 'z_dim': expected 4"),
        ("temperal_downsample", 3, "key 'temperal_downsample': expected a list"),
    ],
)
def test_another_autoencoder_is_named(copy: Callable[[], Path], key: str, value: object, told: str) -> None:
    folder = change(copy(), "vae/config.json", {key: value})
    with pytest.raises(ModelLoadError, match=rf"vae/config.json: {told}"):
        FAMILY.describe(folder)


@pytest.mark.parametrize("component", ["text_encoder", "tokenizer", "vae", "transformer", "scheduler"])
def test_a_missing_component_is_named(copy: Callable[[], Path], component: str) -> None:
    folder = copy()
    shutil.rmtree(folder / component)
    with pytest.raises(ModelLoadError, match=rf"{component}/"):
        load_pipeline(str(folder), device="cpu")


def test_weights_of_another_size_are_named(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "transformer/config.json", {"num_layers": 4, "joint_attention_dim": 24})
    model = FAMILY.describe(folder)
    with pytest.raises(ModelLoadError) as caught:
        model.load_transformer(model.build_transformer(AttentionPolicy()), CPU, torch.float32)
    assert "transformer_blocks.3.img_mod.1.weight" in str(caught.value)
    assert "txt_norm.weight is [32], expected [24]" in str(caught.value)


def test_a_model_of_the_real_size_builds_without_memory(copy: Callable[[], Path]) -> None:
    """Qwen-Image: 20.4 billion parameters. Its published config.json has a key that nothing reads."""
    folder = copy()
    config = {
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
        "guidance_embeds": False,
        "in_channels": 64,
        "joint_attention_dim": 3584,
        "num_attention_heads": 24,
        "num_layers": 60,
        "out_channels": 16,
        "patch_size": 2,
        "pooled_projection_dim": 768,
    }
    change(folder, "transformer/config.json", config)
    change(folder, "vae/config.json", {"z_dim": 16, "temperal_downsample": [False, True, True]})
    transformer = FAMILY.describe(folder).build_transformer(AttentionPolicy())
    assert sum(parameter.numel() for parameter in transformer.parameters()) == 20_430_401_088
    assert all(parameter.is_meta for parameter in transformer.parameters())
