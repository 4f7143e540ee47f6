"""The VAE of `emoji` in the package, how states are stored in 8 bits, and how a narrow VAE is widened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
from scripts.train_embedded import eight_bits
from scripts.train_embedded.architecture import (
    EMOJI_SIZES,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
)
from scripts.train_embedded.clip_vae import WholeClipVae, normalise_and_activate, row_by_row
from scripts.train_embedded.eight_bits import load_eight_bits, rounded, save_eight_bits, watched_inputs
from scripts.train_embedded.export import load_vae
from scripts.train_embedded.train_transformer import initial_states
from scripts.train_embedded.train_vae import training_clips
from scripts.train_embedded.vae_buckets import Bucket
from scripts.train_embedded.widen_vae import widen, widen_decoder
from scripts.train_embedded.world import EMOJI

FOLDER = EMBEDDED_FOLDERS["emoji"]


@torch.no_grad()
def test_the_vae_of_emoji_reconstructs_an_unseen_picture_and_clip() -> None:
    vae = WholeClipVae(load_vae(FOLDER))
    for bucket, bound in ((Bucket(1, 256, 2, 1.0), 28.0), (Bucket(5, 128, 2, 1.0), 23.0)):
        clip, _ = training_clips(bucket, torch.Generator().manual_seed(8), world=EMOJI)
        error = (vae.decode(vae.encode(clip)[0]).clamp(-1, 1) - clip) / 2
        assert -10 * torch.log10((error**2).mean()) > bound


def test_eight_bits_keep_every_weight_to_half_a_step_of_its_channel(tmp_path: Path) -> None:
    state = build_vae(sizes=EMOJI_SIZES).state_dict()
    save_eight_bits(state, tmp_path / "state.safetensors", {"latents_mean": [0.5]})
    loaded, notes = load_eight_bits(tmp_path / "state.safetensors")
    assert notes == {"latents_mean": [0.5]}
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        step = value.flatten(1).abs().amax(dim=1).max() / 127 if value.ndim > 1 else value.abs().max() / 1024
        assert (loaded[name] - value).abs().max() <= 0.51 * step + 1e-8, name


@torch.no_grad()
def test_a_widened_decoder_computes_what_the_narrow_one_did() -> None:
    narrow = load_vae(FOLDER)
    wide = build_vae(sizes=replace(EMOJI_SIZES, decoder_base=36))
    wide.load_state_dict(widen_decoder(narrow.state_dict(), 36))
    latents = torch.randn(1, 16, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    expected = WholeClipVae(narrow).decode(latents)
    assert (WholeClipVae(wide).decode(latents) - expected).abs().max() < 1e-4 * expected.abs().max()
    # What reads the new channels is not zero: they can learn.
    assert wide.decoder.up_blocks[2].resnets[0].conv1.weight[:32, 32:].abs().mean() > 0


@torch.no_grad()
def test_a_widened_encoder_computes_what_the_narrow_one_did() -> None:
    torch.manual_seed(0)
    narrow = build_vae(sizes=replace(EMOJI_SIZES, vae_mult=(1, 2, 2)))
    # Attention is as new: its output is small beside what passes it by, and twice the channels sharpen it.
    wide = build_vae(sizes=EMOJI_SIZES)
    wide.load_state_dict(widen(narrow.state_dict()))
    clip = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    expected, _ = WholeClipVae(narrow).encode(clip)
    found, _ = WholeClipVae(wide).encode(clip)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_rows_are_normalised_as_clips_are() -> None:
    x, gamma = torch.randn(2, 8, 3, 4, 5), torch.rand(8, 1, 1, 1)
    torch.testing.assert_close(row_by_row(normalise_and_activate)(x, gamma), normalise_and_activate(x, gamma))


def test_a_training_goes_on_from_parts_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(EMOJI.words())
    modules = {
        "transformer": build_transformer(EMOJI_SIZES),
        "text_encoder": build_text_encoder(len(tokenizer), EMOJI_SIZES),
    }
    torch.save({name: module.state_dict() for name, module in modules.items()}, tmp_path / "transformer.pt")
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "transformer.pt"), str(tmp_path / "transformer.safetensors")])
    eight_bits.main()
    parts = initial_states(tmp_path / "transformer.safetensors")
    for name, module in modules.items():
        before = {key: value.clone() for key, value in module.state_dict().items()}
        module.load_state_dict(parts[name])
        for key, value in module.state_dict().items():
            assert (value - before[key]).abs().max() <= 0.005 * before[key].abs().max(), key


def test_columns_make_good_what_was_rounded_before_them() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 64, generator=generator)
    # Inputs that depend on each other, as those of layers do.
    inputs = torch.randn(512, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    inputs += 0.05 * torch.randn(512, 64, generator=generator)
    wrong = []
    for moment in (None, inputs.T @ inputs):
        numbers, scale = rounded(weight, moment)
        assert numbers.dtype == torch.int8
        assert (weight.abs().amax(dim=1) / 127 - scale).abs().max() < 1e-7
        wrong.append(float((inputs @ (numbers * scale[:, None] - weight).T).norm()))
    assert wrong[1] < 0.3 * wrong[0]


def test_layers_at_both_ends_stay_in_16_bits(tmp_path: Path) -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    names = ["patch_embedding", "transformer.proj_out", "transformer.blocks.0.ffn"]
    path = tmp_path / "state.safetensors"
    save_eight_bits({f"{name}.weight": weight for name in names}, path, other=torch.bfloat16)
    stored = load_file(path)
    assert [stored[f"{name}.weight"].dtype for name in names] == [torch.bfloat16, torch.bfloat16, torch.int8]


def test_rotated_rows_are_read_as_they_were_and_even_out_a_large_number(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 64, generator=generator)
    weight[:, 5] *= 20
    inputs = torch.randn(512, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    inputs += 0.05 * torch.randn(512, 64, generator=generator)
    wrong: dict[tuple[bool, bool], float] = {}
    for rotates in (False, True):
        for watched in (False, True):
            path = tmp_path / "state.safetensors"
            moments = {"layer": inputs.T @ inputs} if watched else None
            save_eight_bits({"layer.weight": weight}, path, moments=moments, rotates=rotates)
            loaded = load_eight_bits(path)[0]["layer.weight"]
            wrong[rotates, watched] = float((inputs @ (loaded - weight).T).norm())
    assert wrong[True, False] < 0.5 * wrong[False, False]
    # The moments are of rotated inputs too.
    assert wrong[True, True] < 0.3 * wrong[True, False]


def test_the_inputs_of_layers_are_watched_while_they_run() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SiLU(), torch.nn.Linear(4, 2))
    x = torch.randn(2, 5, 3)
    with watched_inputs(model) as moments:
        model(x[:1])
        model(x[1:])
    model(x)
    torch.testing.assert_close(moments["0"], x.flatten(0, 1).T @ x.flatten(0, 1))
    assert set(moments) == {"0", "2"}
