"""What an LTX-2 folder says of sound and sizes; what every folder says and may not say is in family_cases."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_cases import change
from family_parity import CPU
from published_configs import write_published
from safetensors.torch import load_file, save_file
from tiny_ltx2 import AUDIO_BINS, AUDIO_CHANNELS, VIDEO_CHANNELS, write_tiny_ltx2

from benchmarks.families.ltx2 import STEPS
from diffusion_runtime.attention import AttentionConfig, AttentionPolicy
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import BackendUnavailableError, ConfigError, ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.loading.native_preparation import _read_tiny_decoder
from diffusion_runtime.models.ltx2.family import FAMILY
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.part_files import part_files, with_parts
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.weights.level_list_names import level_list_names, vocoder_names

SOUND_ROLES = ("ltx2.audio_self", "ltx2.audio_cross", "ltx2.audio_to_video", "ltx2.video_to_audio")


def test_json_says_the_sound_and_a_shift_that_follows_the_size(tiny_folder: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(model_path=str(tiny_folder))).rules
    assert isinstance(rules, RequestRules)
    expected = LTX2Geometry(VIDEO_CHANNELS, 32, 8, (1, 1, 1), AUDIO_CHANNELS, AUDIO_BINS, 25.0, min_latents=2)
    assert rules.sampling.geometry == expected
    assert rules.makes_sound
    # The line through 0.95 at 1024 tokens and 2.05 at 4096, of the video's tokens alone: exp(0.95) at 16 x 8 x 8.
    tokens = rules.sampling.geometry.num_tokens(256, 256, 121)
    assert rules.sampling.schedule.flow_shift(tokens, 40) == pytest.approx(2.5857, rel=1e-4)


def test_a_preview_needs_the_decoder_of_its_release() -> None:
    for hub_id, told in (
        ("Lightricks/LTX-2", "taeltx_2.safetensors is missing"),
        ("diffusers/LTX-2.3-Diffusers", "taeltx2_3.safetensors is missing"),
        ("Lightricks/LTX-2.5-Diffusers", "no tiny decoder is published"),
    ):
        folder = packaged_folder(hub_id)
        assert folder is not None
        with pytest.raises(ConfigError, match=re.escape(told)):
            _read_tiny_decoder(RuntimeConfig(hub_id, vae_decoder="tiny"), FAMILY.describe(ModelFolder(folder)))


def test_latents_of_the_benchmark_are_a_sample(tmp_path: Path) -> None:
    folder = write_published(tmp_path, "LTX-2")
    latents, _, inputs = STEPS[0].make_inputs(CPU, torch.float32).ours
    geometry = family_for_folder(folder).describe(folder).geometry
    assert tuple(latents.shape[1:]) == geometry.sample_shape(inputs.size)


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


def test_a_choice_by_role_reaches_the_sound_and_a_sparse_one_passes_over_it(tiny_folder: Path) -> None:
    choice = {
        "default": {"backend": "video_sparse_attn"},
        "per_role": {"cross": {"backend": "reference"}, "ltx2.audio_self": {"backend": "torch_sdpa"}},
    }
    model = family_for_folder(tiny_folder).describe(tiny_folder)
    policy = AttentionPolicy(config=AttentionConfig.parse(choice))
    layers = model.build_transformer(policy).attention_layers()
    chosen = {layer.layer.role: layer.decisions.possible[0][1].backend for layer in layers}
    others = dict.fromkeys(("cross", *SOUND_ROLES), "reference")
    assert chosen == {"self": "video_sparse_attn", **others, "ltx2.audio_self": "torch_sdpa"}
    for role in SOUND_ROLES:
        wrong = AttentionConfig.parse({"per_role": {role: {"backend": "video_sparse_attn"}}})
        with pytest.raises(BackendUnavailableError, match="video_sparse_attn"):
            model.build_transformer(AttentionPolicy(config=wrong))


@pytest.mark.parametrize("component", ["vae", "audio_vae", "vocoder"])
def test_a_missing_decoder_is_named(tiny_copy: Callable[[], Path], component: str) -> None:
    folder = tiny_copy()
    (folder / component / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=f"copy/{component}"):
        FAMILY.describe(folder).load_decoder(CPU, torch.float32)


# By whether it is LTX-2.3, out of diffusers' conversion script; its single-file loader knows no vocoder.
AUTHORS_VOCODER_NAMES = {
    False: {f"vocoder.{name}" for name in ("conv_pre.bias", "ups.1.weight", "resblocks.0.convs1.0.weight")},
    True: {
        "vocoder.vocoder.conv_pre.weight",
        "vocoder.vocoder.ups.1.weight",
        "vocoder.vocoder.resblocks.1.acts1.0.upsample.filter",
        "vocoder.vocoder.resblocks.1.acts2.0.downsample.lowpass.filter",
        "vocoder.vocoder.act_post.act.alpha",
        "vocoder.bwe_generator.conv_post.weight",
        "vocoder.mel_stft.stft_fn.forward_basis",
    },
}


@pytest.mark.parametrize("is_ltx23", [False, True])
def test_decoders_are_read_out_of_one_file_of_the_authors(tiny_folder: Path, tmp_path: Path, is_ltx23: bool) -> None:
    """Bit for bit; beside the transformer and statistics that nothing reads."""
    folder = write_tiny_ltx2(tmp_path / "model", is_ltx23=True) if is_ltx23 else tiny_folder
    tensors = {"vae.per_channel_statistics.mean-of-stds": torch.ones(6), "model.diffusion_model.proj": torch.ones(1)}
    for component in ("vae", "audio_vae", "vocoder"):
        state = load_file(folder / component / "diffusion_pytorch_model.safetensors")
        names = vocoder_names(state) if component == "vocoder" else level_list_names(state)
        assert set(names) != set(state)
        tensors |= {f"{component}.{original}": state[name] for original, name in names.items()}
    assert AUTHORS_VOCODER_NAMES[is_ltx23] <= tensors.keys()
    save_file(tensors, tmp_path / "all.safetensors")
    paths = {f"{name}_path": str(tmp_path / "all.safetensors") for name in ("vae", "audio_vae", "vocoder")}
    bare = shutil.copytree(folder, tmp_path / "bare")
    for component in ("vae", "audio_vae", "vocoder"):
        (bare / component / "diffusion_pytorch_model.safetensors").unlink()
    changed = with_parts(ModelFolder(bare), part_files(RuntimeConfig(model_path=str(bare), **paths)), None, ())
    found, expected = (
        FAMILY.describe(each).load_decoder(CPU, torch.float32) for each in (changed, ModelFolder(folder))
    )
    for part in (lambda of: of._autoencoder, lambda of: of.sound.autoencoder, lambda of: of.sound.vocoder):
        ours, theirs = (part(decoder).state_dict() for decoder in (found, expected))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
