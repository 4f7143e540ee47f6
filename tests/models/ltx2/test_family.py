"""What an LTX-2 folder says: geometry, defaults, and every setting that is missing, broken or another model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import CPU, load_transformer, write_plain_scheduler
from open_fields import OPEN_FIELDS
from tiny_ltx2 import AUDIO_BINS, AUDIO_CHANNELS, VIDEO_CHANNELS

from benchmarks.families.ltx2 import STEPS
from diffusion_runtime.attention import AttentionConfig, AttentionPolicy
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import BackendUnavailableError, ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.ltx2.family import FAMILY
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request import GenerationRequest
from diffusion_runtime.request_rules import RequestRules

CONFIG = "transformer/config.json"
SOUND_ROLES = ("ltx2.audio_self", "ltx2.audio_cross", "ltx2.audio_to_video", "ltx2.video_to_audio")


def change(folder: Path, name: str, values: dict[str, Any]) -> Path:
    """Set keys of a json file; `...` takes the key out."""
    path = folder / name
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


def build(folder: Path) -> None:
    family_for_folder(folder).describe(folder).build_transformer(AttentionPolicy())


# --- what a folder says -----------------------------------------------------------------------------------------------


def test_json_alone_says_geometry_schedule_and_attention(tiny_copy: Callable[[], Path]) -> None:
    folder = tiny_copy()
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    description = inspect_pipeline(RuntimeConfig(model_path=str(folder)))
    rules = description.rules
    assert isinstance(rules, RequestRules)
    expected = LTX2Geometry(VIDEO_CHANNELS, 32, 8, (1, 1, 1), AUDIO_CHANNELS, AUDIO_BINS, 25.0, min_latents=2)
    assert rules.geometry == expected
    assert rules.makes_sound
    assert not rules.takes_image
    assert not rules.embeds_guidance
    assert rules.schedule.sigmas(4) == (1.0, 0.75, 0.5, 0.25)
    # The line through 0.95 at 1024 tokens and 2.05 at 4096, of the video's tokens alone: exp(0.95) at 16 x 8 x 8.
    tokens = rules.geometry.num_tokens(256, 256, 121)
    assert rules.schedule.flow_shift(tokens, 40) == pytest.approx(2.5857, rel=1e-4)
    assert {row.role for row in description.attention} == {"self", "cross", *SOUND_ROLES}


def test_the_defaults_complete_a_request() -> None:
    request = GenerationRequest(prompt="a cat").with_defaults(FAMILY.defaults)
    open_fields = {name for name, value in request.to_dict().items() if value is None}
    # The flow shift follows the size.
    assert open_fields == OPEN_FIELDS | {"flow_shift"}


def test_a_sample_holds_the_video_and_then_its_sound() -> None:
    geometry = LTX2Geometry(2, 32, 8, (1, 1, 1), 3, 4, 25.0)
    size = ClipSize(64, 96, 9, 25)
    # 2 x 2 x 2 x 3 numbers of video, and 9 moments of 3 x 4 numbers of sound.
    assert geometry.sample_shape(size) == (24 + 108,)
    latents = torch.arange(2 * 132, dtype=torch.float32).view(2, 132)
    parts = geometry.parts(latents, size)
    assert parts.audio is not None
    assert parts.video.shape == (2, 2, 2, 2, 3)
    assert parts.audio.shape == (2, 3, 9, 4)
    assert (parts.video[1, 0, 0, 0, 0], parts.audio[0, 0, 0, 0]) == (132, 24)
    assert torch.equal(geometry.join(parts.video, parts.audio), latents)


def test_the_sound_is_as_long_as_the_video() -> None:
    geometry = LTX2Geometry(2, 32, 8, (1, 1, 1), 3, 4, 25.0)
    lengths = {fps: geometry.audio_shape(ClipSize(64, 64, 121, fps))[1] for fps in (12, 24, 30, 50)}
    # 100.8 moments at 30 frames a second, and 60.5 at 50: rounded as in diffusers, a half to the even number.
    assert lengths == {12: 252, 24: 126, 30: 101, 50: 60}
    with pytest.raises(RequestError, match="height: expected a multiple of 32, got 65"):
        geometry.sample_shape(ClipSize(65, 64, 121, 24))


@pytest.mark.parametrize(("padding", "smallest"), [("reflect", 64), ("zeros", 32)])
def test_a_picture_too_small_to_decode_is_refused_before_any_work(
    tiny_copy: Callable[[], Path], padding: str, smallest: int
) -> None:
    """Published decoders mirror the edges of latents, for which two must be there."""
    folder = change(tiny_copy(), "vae/config.json", {"decoder_spatial_padding_mode": padding})
    geometry = family_for_folder(folder).describe(folder).geometry
    geometry.sample_shape(ClipSize(smallest, smallest, 1, 24))
    if smallest > 32:
        with pytest.raises(RequestError, match="width: expected 64 or more, got 32"):
            geometry.sample_shape(ClipSize(64, 32, 1, 24))


def test_a_real_size_config_builds_without_memory(tmp_path: Path) -> None:
    """48 blocks of a stream 4096 and a stream 2048 wide: 18.9 billion parameters."""
    step = STEPS[0]
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", step.transformer_class]}))
    for name, values in {"transformer": step.config, "vae": step.vae_config, **step.other_configs}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(dict(values)))
    write_plain_scheduler(tmp_path)
    transformer = family_for_folder(tmp_path).describe(tmp_path).build_transformer(AttentionPolicy())
    assert sum(parameter.numel() for parameter in transformer.parameters()) == 18_876_174_592
    assert all(parameter.is_meta for parameter in transformer.parameters())
    latents, _, inputs = step.make_inputs(CPU, torch.float32).ours
    assert tuple(latents.shape[1:]) == transformer.geometry.sample_shape(inputs.size)


def test_a_choice_by_role_reaches_the_sound_and_a_sparse_one_passes_over_it(tiny_folder: Path) -> None:
    choice = {
        "default": {"backend": "video_sparse_attn"},
        "per_role": {"cross": {"backend": "reference"}, "ltx2.audio_self": {"backend": "torch_sdpa"}},
    }
    model = family_for_folder(tiny_folder).describe(tiny_folder)
    policy = AttentionPolicy(config=AttentionConfig.parse(choice))
    layers = model.build_transformer(policy).attention_layers()
    chosen = {layer.layer.role: layer.decisions[0][1].backend for layer in layers}
    others = dict.fromkeys(("cross", *SOUND_ROLES), "reference")
    assert chosen == {"self": "video_sparse_attn", **others, "ltx2.audio_self": "torch_sdpa"}
    for role in SOUND_ROLES:
        wrong = AttentionConfig.parse({"per_role": {role: {"backend": "video_sparse_attn"}}})
        with pytest.raises(BackendUnavailableError, match="video_sparse_attn"):
            model.build_transformer(AttentionPolicy(config=wrong))


# --- what cannot be used ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["in_channels", "audio_in_channels", "num_layers", "num_attention_heads", "caption_channels"]
)
def test_a_missing_key_is_named(tiny_copy: Callable[[], Path], key: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"{CONFIG}: key '{key}' is missing"):
        build(change(tiny_copy(), CONFIG, {key: ...}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 2),
        ("audio_patch_size", 2),
        ("qk_norm", "layer_norm"),
        ("rope_type", "spiral"),
        ("vae_scale_factors", [8, 32]),
        ("attention_head_dim", 15),
        ("cross_attention_dim", 16),
        ("audio_cross_attention_dim", 32),
        ("out_channels", 12),
        ("norm_elementwise_affine", True),
        # LTX-2.3 and 2.5.
        ("gated_attn", True),
        ("audio_cross_attn_mod", True),
        ("use_prompt_embeddings", False),
        ("ff_bias", False),
    ],
)
def test_a_value_that_is_not_supported_is_named(tiny_copy: Callable[[], Path], key: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"{CONFIG}: key '{key}': expected .*, got "):
        build(change(tiny_copy(), CONFIG, {key: value}))


def test_streams_of_other_heads_are_refused(tiny_copy: Callable[[], Path]) -> None:
    values = {"audio_num_attention_heads": 4, "audio_attention_head_dim": 4}
    with pytest.raises(ModelLoadError, match="key 'audio_num_attention_heads': expected 2, num_attention_heads, got 4"):
        build(change(tiny_copy(), CONFIG, values))


def test_a_setting_of_something_newer_is_named(tiny_copy: Callable[[], Path]) -> None:
    with pytest.raises(ModelLoadError, match=rf"{CONFIG}: key 'use_meanflow' is unknown"):
        build(change(tiny_copy(), CONFIG, {"use_meanflow": True}))


def test_another_pipeline_of_the_same_transformer_is_refused(tiny_copy: Callable[[], Path]) -> None:
    with pytest.raises(ModelLoadError, match="expected LTX2Pipeline, got 'LTX2ImageToVideoPipeline'"):
        FAMILY.check(change(tiny_copy(), "model_index.json", {"_class_name": "LTX2ImageToVideoPipeline"}))


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("vae", {"latent_channels": 32}, r"vae/config.json: key 'latent_channels': expected 6"),
        ("audio_vae", {"mel_bins": 64}, r"audio_vae/config.json: keys 'latent_channels' \(2\) and 'mel_bins' \(64\)"),
    ],
)
def test_latents_of_another_width_are_named(
    tiny_copy: Callable[[], Path], name: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelLoadError, match=told):
        build(change(tiny_copy(), f"{name}/config.json", values))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("text_encoder/config.json", "text_encoder/config.json"),
        ("text_encoder/model.safetensors", "text_encoder"),
        ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json is missing"),
        ("connectors/config.json", "connectors/config.json"),
        ("connectors/diffusion_pytorch_model.safetensors", "connectors"),
    ],
)
def test_a_missing_part_of_the_text_is_named(tiny_copy: Callable[[], Path], name: str, told: str) -> None:
    folder = tiny_copy()
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=told):
        FAMILY.describe(folder).load_text_encoder(CPU, torch.float32)


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("text_encoder", {"model_type": "gemma4"}, "model_type: expected 'gemma3' or 'gemma3_text', got 'gemma4'"),
        ("connectors", {"caption_channels": 31}, "key 'caption_channels': expected 32"),
        ("connectors", {"text_proj_in_factor": 49}, "key 'text_proj_in_factor': expected 4"),
        ("connectors", {"audio_connector_attention_head_dim": 8}, r"_dim' \(8\): expected their product to be 32"),
        ("connectors", {"video_connector_num_learnable_registers": 100}, "expected a number that divides 1024"),
    ],
)
def test_texts_that_do_not_fit_are_named(
    tiny_copy: Callable[[], Path], file: str, values: dict[str, Any], told: str
) -> None:
    folder = change(tiny_copy(), f"{file}/config.json", values)
    with pytest.raises(ModelLoadError, match=told):
        FAMILY.describe(folder).load_text_encoder(CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("vae/config.json", {"use_wavelets": True}, r"vae/config.json: key 'use_wavelets' is unknown"),
        ("vae/config.json", {"timestep_conditioning": True}, "key 'timestep_conditioning': expected false"),
        ("vae/config.json", {"decoder_inject_noise": [False, True, False, False]}, "key 'decoder_inject_noise'"),
        ("audio_vae/config.json", {"stereo": True}, r"audio_vae/config.json: key 'stereo' is unknown"),
        ("vocoder/config.json", {"pitch": 1}, r"vocoder/config.json: key 'pitch' is unknown"),
        (
            "model_index.json",
            {"vocoder": ["ltx2", "LTX2VocoderWithBWE"]},
            "key 'vocoder': expected LTX2Vocoder, got LTX2Vo",
        ),
    ],
)
def test_decoders_that_cannot_be_used_are_named(
    tiny_copy: Callable[[], Path], name: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelLoadError, match=told):
        FAMILY.check(change(tiny_copy(), name, values))


@pytest.mark.parametrize("component", ["vae", "audio_vae", "vocoder"])
def test_a_missing_decoder_is_named(tiny_copy: Callable[[], Path], component: str) -> None:
    folder = tiny_copy()
    (folder / component / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=f"copy/{component}"):
        FAMILY.describe(folder).load_decoder(CPU, torch.float32)


def test_weights_of_another_size_are_named(tiny_copy: Callable[[], Path]) -> None:
    folder = change(tiny_copy(), CONFIG, {"caption_channels": 16, "num_layers": 3})
    with pytest.raises(ModelLoadError) as caught:
        load_transformer(family_for_folder(folder), folder)
    assert "transformer_blocks.2.scale_shift_table" in str(caught.value)
    assert "caption_projection.linear_1.weight is [32, 32], expected [32, 16]" in str(caught.value)
