"""What a FLUX.1 folder says: every setting that is missing, broken or not for this family, and missing parts."""

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
from diffusion_runtime.models.flux1.family import FAMILY
from diffusion_runtime.request import GenerationRequest

CPU = torch.device("cpu")


@pytest.fixture
def copy(tiny_flux1_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy of the tiny folder that the test may damage."""
    return lambda: Path(shutil.copytree(tiny_flux1_folder, tmp_path / "damaged"))


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
    assert (geometry.num_channels, geometry.spatial_factor, geometry.patch) == (4, 2, (1, 2, 2))
    build(folder)


def test_the_defaults_complete_a_request_but_for_the_shift(tiny_flux1_folder: Path) -> None:
    defaults = FAMILY.describe(tiny_flux1_folder).defaults
    request = GenerationRequest(prompt="a cat").with_defaults(defaults)
    open_fields = {name for name, value in request.to_dict().items() if value is None}
    assert open_fields == OPEN_FIELDS | {"flow_shift"}
    assert FAMILY.describe(tiny_flux1_folder).embeds_guidance


@pytest.mark.parametrize(
    "key",
    ["in_channels", "num_layers", "num_single_layers", "attention_head_dim", "joint_attention_dim"],
)
def test_a_missing_key_is_named(copy: Callable[[], Path], key: str) -> None:
    folder = change(copy(), "transformer/config.json", {key: None})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key '{key}' is missing"):
        build(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 2),
        ("in_channels", 18),
        ("num_layers", "2"),
        ("axes_dims_rope", [4, 6, 8]),
        ("axes_dims_rope", [5, 5, 6]),
        ("axes_dims_rope", [16]),
        ("guidance_embeds", 1),
    ],
)
def test_a_value_that_does_not_fit_is_named(copy: Callable[[], Path], key: str, value: object) -> None:
    folder = change(copy(), "transformer/config.json", {key: value})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key '{key}': expected .*, got "):
        build(folder)


def test_checkpoints_of_other_tasks_are_refused(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "transformer/config.json", {"in_channels": 96, "out_channels": 16})
    with pytest.raises(ModelLoadError, match=r"'in_channels' \(96\) and 'out_channels' \(16\) differ"):
        build(folder)


def test_an_unknown_key_is_named(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "transformer/config.json", {"guidance_embed": True})
    with pytest.raises(ModelLoadError, match=r"'guidance_embed' is unknown .* Did you mean 'guidance_embeds'"):
        build(folder)


def test_latents_of_another_width_are_named(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "vae/config.json", {"latent_channels": 16})
    with pytest.raises(ModelLoadError, match=r"vae/config.json: key 'latent_channels': expected 4"):
        FAMILY.describe(folder)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("max_image_seq_len", 100, "max_image_seq_len: expected more than base_image_seq_len"),
        ("base_shift", "half", "base_shift: expected a number, got 'half'"),
        ("time_shift_type", "cubic", "time_shift_type: expected one of"),
    ],
)
def test_a_schedule_that_is_no_line_is_refused(copy: Callable[[], Path], key: str, value: object, told: str) -> None:
    folder = change(copy(), "scheduler/scheduler_config.json", {key: value})
    with pytest.raises(ModelLoadError, match=told):
        load_pipeline(str(folder), device="cpu")


@pytest.mark.parametrize(
    "component", ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae", "transformer", "scheduler"]
)
def test_a_missing_component_is_named(copy: Callable[[], Path], component: str) -> None:
    folder = copy()
    shutil.rmtree(folder / component)
    with pytest.raises(ModelLoadError, match=rf"{component}/"):
        load_pipeline(str(folder), device="cpu")


def test_weights_of_another_size_are_named(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "transformer/config.json", {"num_single_layers": 3, "pooled_projection_dim": 24})
    model = FAMILY.describe(folder)
    with pytest.raises(ModelLoadError) as caught:
        model.load_transformer(model.build_transformer(AttentionPolicy()), CPU, torch.float32)
    assert "single_transformer_blocks.2.norm.linear.weight" in str(caught.value)
    assert "text_embedder.linear_1.weight is [32, 32], expected [32, 24]" in str(caught.value)


def test_a_model_of_the_real_size_builds_without_memory(copy: Callable[[], Path]) -> None:
    """FLUX.1 [dev]: 11.9 billion parameters."""
    folder = copy()
    config = {
        "attention_head_dim": 128,
        "guidance_embeds": True,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 19,
        "num_single_layers": 38,
        "patch_size": 1,
        "pooled_projection_dim": 768,
        "axes_dims_rope": None,
        "out_channels": None,
    }
    change(folder, "transformer/config.json", config)
    change(folder, "vae/config.json", {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]})
    transformer = FAMILY.describe(folder).build_transformer(AttentionPolicy())
    assert sum(parameter.numel() for parameter in transformer.parameters()) == 11_901_408_320
    assert all(parameter.is_meta for parameter in transformer.parameters())
