"""What a HunyuanVideo folder says: its geometry and defaults, and every setting that is missing, broken or another
model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import CPU, load_transformer
from open_fields import OPEN_FIELDS

from diffusion_runtime.attention import AttentionConfig, AttentionPolicy
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import BackendUnavailableError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.hunyuan_video.family import FAMILY
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request import GenerationRequest

CONFIG = "transformer/config.json"


def change(folder: Path, name: str, values: dict[str, Any]) -> Path:
    """Set keys of a json file; `...` takes the key out."""
    path = folder / name
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def build(folder: Path) -> None:
    family_for_folder(folder).describe(folder).build_transformer(AttentionPolicy())


def test_json_alone_says_geometry_schedule_and_attention(tiny_copy: Callable[[], Path]) -> None:
    folder = tiny_copy()
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    description = inspect_pipeline(RuntimeConfig(model_path=str(folder)))
    geometry = description.rules.geometry
    assert (geometry.num_channels, geometry.spatial_factor, geometry.temporal_factor) == (16, 8, 4)
    assert geometry.patch == (1, 2, 2)
    assert description.rules.embeds_guidance
    assert not description.rules.takes_image
    assert description.rules.schedule.sigmas(4) == (1.0, 0.75, 0.5, 0.25)
    assert description.rules.defaults["flow_shift"] == 7.0
    assert {row.role for row in description.attention} == {"self", "hunyuan_video.text_refiner"}


def test_the_defaults_complete_a_request() -> None:
    request = GenerationRequest(prompt="a cat").with_defaults(FAMILY.defaults)
    open_fields = {name for name, value in request.to_dict().items() if value is None}
    assert open_fields == OPEN_FIELDS


def test_a_choice_by_role_reaches_the_refiner_and_a_sparse_one_passes_over_it(tiny_folder: Path) -> None:
    choice = {"default": {"backend": "video_sparse_attn"}, "per_role": {"cross": {"backend": "flex_attn"}}}
    model = family_for_folder(tiny_folder).describe(tiny_folder)
    policy = AttentionPolicy(config=AttentionConfig.parse(choice))
    layers = model.build_transformer(policy).attention_layers()
    chosen = {layer.layer.role: layer.decisions[0][1].backend for layer in layers}
    assert chosen == {"self": "video_sparse_attn", "hunyuan_video.text_refiner": "flex_attn"}
    wrong = {"per_role": {"hunyuan_video.text_refiner": {"backend": "video_sparse_attn"}}}
    with pytest.raises(BackendUnavailableError, match="video_sparse_attn"):
        model.build_transformer(AttentionPolicy(config=AttentionConfig.parse(wrong)))


@pytest.mark.parametrize(
    "key", ["in_channels", "num_layers", "num_attention_heads", "attention_head_dim", "text_embed_dim", "rope_axes_dim"]
)
def test_a_missing_key_is_named(tiny_copy: Callable[[], Path], key: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"{CONFIG}: key '{key}' is missing"):
        build(change(tiny_copy(), CONFIG, {key: ...}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 0),
        ("num_single_layers", "2"),
        ("mlp_ratio", "four"),
        ("guidance_embeds", 1),
        ("qk_norm", "layer_norm"),
        ("rope_axes_dim", [4, 6]),
        ("rope_axes_dim", [4, 6, 8]),
        ("rope_axes_dim", [5, 5, 6]),
    ],
)
def test_a_wrong_value_is_named(tiny_copy: Callable[[], Path], key: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"{CONFIG}: key '{key}': expected .*, got "):
        build(change(tiny_copy(), CONFIG, {key: value}))


def test_a_setting_of_something_newer_is_named(tiny_copy: Callable[[], Path]) -> None:
    with pytest.raises(ModelLoadError, match=rf"{CONFIG}: key 'use_meanflow' is unknown"):
        build(change(tiny_copy(), CONFIG, {"use_meanflow": True}))


@pytest.mark.parametrize("values", [{"image_condition_type": "token_replace"}, {"in_channels": 33}])
def test_image_conditioned_checkpoints_are_refused(tiny_copy: Callable[[], Path], values: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"image_condition_type.*in_channels.*image-conditioned checkpoint"):
        build(change(tiny_copy(), CONFIG, values))


def test_a_shift_that_follows_the_size_is_refused(tiny_copy: Callable[[], Path]) -> None:
    folder = change(tiny_copy(), "scheduler/scheduler_config.json", {"use_dynamic_shifting": True})
    with pytest.raises(ModelLoadError, match="use_dynamic_shifting"):
        inspect_pipeline(RuntimeConfig(model_path=str(folder)))


def test_latents_of_another_width_are_named(tiny_copy: Callable[[], Path]) -> None:
    folder = change(tiny_copy(), "vae/config.json", {"latent_channels": 32})
    with pytest.raises(ModelLoadError, match=r"vae/config.json: key 'latent_channels': expected 16"):
        build(folder)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("text_encoder/config.json", "text_encoder/config.json"),
        ("text_encoder/model.safetensors", "text_encoder"),
        ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json is missing"),
        ("text_encoder_2/config.json", "text_encoder_2/config.json"),
        ("tokenizer_2/tokenizer.json", "tokenizer_2/vocab.json is missing"),
    ],
)
def test_a_missing_part_of_the_text_encoders_is_named(tiny_copy: Callable[[], Path], name: str, told: str) -> None:
    folder = tiny_copy()
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=told):
        FAMILY.describe(folder).load_text_encoder(CPU, torch.float32)


def test_an_encoder_of_another_kind_is_named(tiny_copy: Callable[[], Path]) -> None:
    folder = change(tiny_copy(), "text_encoder/config.json", {"model_type": "umt5"})
    with pytest.raises(ModelLoadError, match="model_type: expected 'llama', got 'umt5'"):
        FAMILY.describe(folder).load_text_encoder(CPU, torch.float32)


def test_a_decoder_setting_of_a_newer_diffusers_is_named(tiny_copy: Callable[[], Path]) -> None:
    folder = change(tiny_copy(), "vae/config.json", {"use_wavelets": True})
    with pytest.raises(ModelLoadError, match=r"vae/config.json: key 'use_wavelets' is unknown"):
        FAMILY.describe(folder).load_decoder(CPU, torch.float32)


def test_weights_of_another_size_are_named(tiny_copy: Callable[[], Path]) -> None:
    folder = change(tiny_copy(), CONFIG, {"mlp_ratio": 3.0, "num_layers": 3})
    with pytest.raises(ModelLoadError) as caught:
        load_transformer(family_for_folder(folder), folder)
    assert "transformer_blocks.2.attn.to_q.weight" in str(caught.value)
    assert "transformer_blocks.0.ff.net.0.proj.weight is [128, 32], expected [96, 32]" in str(caught.value)
