"""What a Z-Image folder says, and what it may not say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffusion_runtime import load_pipeline
from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.registry import family_for_folder

REAL = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "cap_feat_dim": 2560,
    "dim": 3840,
    "in_channels": 16,
    "n_heads": 30,
    "n_kv_heads": 30,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}


@pytest.fixture
def copy(tiny_z_image_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    return lambda: Path(shutil.copytree(tiny_z_image_folder, tmp_path / "damaged"))


def change(folder: Path, name: str, values: dict[str, object]) -> Path:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("all_patch_size", [4], r"expected \[2\], the only value"),
        ("siglip_feat_dim", 1152, "expected None, the only value"),
        ("qk_norm", False, "expected true"),
        ("n_kv_heads", 1, "expected n_heads, 3"),
        ("axes_dims", [4, 6, 8], "even numbers whose sum is the head size, 16"),
        ("dim", 50, "a multiple of n_heads, 3"),
        ("n_experts", 4, "is unknown to this runtime"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_named(
    copy: Callable[[], Path], key: str, value: object, told: str
) -> None:
    folder = change(copy(), "transformer/config.json", {key: value})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key '{key}'.*{told}"):
        family_for_folder(folder).describe(folder).build_transformer(AttentionPolicy())


@pytest.mark.parametrize("component", ["text_encoder", "tokenizer", "vae", "transformer", "scheduler"])
def test_a_missing_component_is_named(copy: Callable[[], Path], component: str) -> None:
    folder = copy()
    shutil.rmtree(folder / component)
    with pytest.raises(ModelLoadError, match=rf"{component}/"):
        load_pipeline(str(folder), device="cpu")


def test_weights_of_another_size_are_named(copy: Callable[[], Path]) -> None:
    folder = change(copy(), "transformer/config.json", {"n_layers": 3})
    model = family_for_folder(folder).describe(folder)
    with pytest.raises(ModelLoadError, match=r"layers\.2\.attention\.to_q\.weight"):
        model.load_transformer(model.build_transformer(AttentionPolicy()), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("flow_shift", "steps", "scale"), [(3.0, 8, 0.0), (6.0, 50, 4.0)])
def test_the_model_before_distillation_has_settings_of_its_own(
    copy: Callable[[], Path], flow_shift: float, steps: int, scale: float
) -> None:
    """Z-Image-Turbo runs eight forward passes without guidance; Z-Image needs both more steps and guidance."""
    folder = copy()
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shift": flow_shift}))
    defaults = family_for_folder(folder).describe(folder).defaults
    assert (defaults["num_inference_steps"], defaults["guidance_scale"]) == (steps, scale)


def test_a_model_of_the_real_size_builds_without_memory(copy: Callable[[], Path]) -> None:
    """Z-Image-Turbo: 6.15 billion parameters."""
    folder = copy()
    (folder / "transformer" / "config.json").write_text(json.dumps(REAL))
    change(folder, "vae/config.json", {"latent_channels": 16})
    transformer = family_for_folder(folder).describe(folder).build_transformer(AttentionPolicy())
    assert sum(parameter.numel() for parameter in transformer.parameters()) == pytest.approx(6.155e9, rel=1e-3)
