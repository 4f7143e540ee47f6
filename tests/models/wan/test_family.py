"""What a Wan folder says: its geometry, and every setting that is missing, broken or not for this family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from open_fields import OPEN_FIELDS

from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.request import GenerationRequest

CPU = torch.device("cpu")


def change(folder: Path, name: str, values: dict[str, Any]) -> Path:
    """Set keys of a json file; a value of None takes the key out."""
    path = folder / name
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def build(folder: Path) -> None:
    FAMILY.describe(folder).build_transformer(AttentionPolicy())


def test_geometry_is_read_from_json_alone(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    geometry = FAMILY.describe(folder).geometry
    assert (geometry.num_channels, geometry.spatial_factor, geometry.temporal_factor) == (16, 8, 4)
    assert geometry.patch == (1, 2, 2)
    build(folder)


def test_the_defaults_complete_a_request() -> None:
    request = GenerationRequest(prompt="a cat").with_defaults(FAMILY.defaults)
    open_fields = {name for name, value in request.to_dict().items() if value is None}
    assert open_fields == OPEN_FIELDS


@pytest.mark.parametrize(
    "key", ["patch_size", "num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "text_dim", "freq_dim"]
)
def test_a_missing_key_is_named(tiny_wan_copy: Callable[[], Path], key: str) -> None:
    folder = change(tiny_wan_copy(), "transformer/config.json", {key: None})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key '{key}' is missing"):
        build(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", [1, 2]),
        ("patch_size", 2),
        ("num_layers", 0),
        ("num_layers", "2"),
        ("attention_head_dim", 15),
        ("freq_dim", 7),
        ("ffn_dim", 1.5),
        ("eps", "small"),
        ("cross_attn_norm", 1),
        ("qk_norm", "rms_norm"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(tiny_wan_copy: Callable[[], Path], key: str, value: object) -> None:
    folder = change(tiny_wan_copy(), "transformer/config.json", {key: value})
    with pytest.raises(ModelLoadError, match=rf"transformer/config.json: key '{key}': expected .*, got "):
        build(folder)


@pytest.mark.parametrize(("key", "value"), [("image_dim", 1280), ("added_kv_proj_dim", 64), ("pos_embed_seq_len", 514)])
def test_image_conditioned_checkpoints_are_refused_by_their_key(
    tiny_wan_copy: Callable[[], Path], key: str, value: int
) -> None:
    folder = change(tiny_wan_copy(), "transformer/config.json", {key: value})
    with pytest.raises(ModelLoadError, match=rf"config.json: key '{key}' is {value}: this is an image-conditioned"):
        build(folder)


def test_other_checkpoints_than_text_to_video_are_refused(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = change(tiny_wan_copy(), "transformer/config.json", {"in_channels": 36})
    with pytest.raises(ModelLoadError, match=r"'in_channels' \(36\) and 'out_channels' \(16\) differ"):
        build(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("transformer_2", ["diffusers", "WanTransformer3DModel"]), ("boundary_ratio", 0.875)]
)
def test_two_experts_and_the_boundary_between_them_belong_together(
    tiny_wan_copy: Callable[[], Path], key: str, value: object
) -> None:
    folder = change(tiny_wan_copy(), "model_index.json", {key: value})
    with pytest.raises(ModelLoadError, match=r"model_index.json: keys 'transformer_2' and 'boundary_ratio'"):
        build(folder)


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1])
def test_a_boundary_is_a_share_of_the_noise(tiny_wan_copy: Callable[[], Path], value: float) -> None:
    both = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": value}
    folder = change(tiny_wan_copy(), "model_index.json", both)
    with pytest.raises(ModelLoadError, match=r"key 'boundary_ratio': expected a number between 0 and 1"):
        build(folder)


def test_experts_do_not_start_from_an_image(tiny_wan_copy: Callable[[], Path]) -> None:
    values = {
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "boundary_ratio": 0.9,
        "expand_timesteps": True,
    }
    folder = change(tiny_wan_copy(), "model_index.json", values)
    with pytest.raises(ModelLoadError, match=r"key 'expand_timesteps': expected false in a model of two experts"):
        build(folder)


def test_an_image_is_whole_tokens(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = change(tiny_wan_copy(), "model_index.json", {"expand_timesteps": True})
    change(folder, "transformer/config.json", {"patch_size": [2, 2, 2]})
    with pytest.raises(ModelLoadError, match=r"key 'patch_size': expected 1 latent frame a token"):
        build(folder)


def test_latents_of_another_width_are_named(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = change(tiny_wan_copy(), "vae/config.json", {"z_dim": 48})
    with pytest.raises(ModelLoadError, match=r"vae/config.json: key 'z_dim': expected 16"):
        FAMILY.describe(folder)


def test_weights_of_another_size_are_named(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = change(tiny_wan_copy(), "transformer/config.json", {"ffn_dim": 100, "num_layers": 3})
    model = FAMILY.describe(folder)
    with pytest.raises(ModelLoadError) as caught:
        model.load_transformer(model.build_transformer(AttentionPolicy()), CPU, torch.float32)
    assert "blocks.2.attn1.to_q.weight" in str(caught.value)
    assert "blocks.0.ffn.net.0.proj.weight is [96, 64], expected [100, 64]" in str(caught.value)
