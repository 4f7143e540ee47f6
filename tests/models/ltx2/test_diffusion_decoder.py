"""LTX-2.5's diffusion decoder against diffusers' own attention in the same model, on the CPU in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from tiny_ltx2 import TINY_SIZES, VIDEO_CHANNELS

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.decoders import window_tiles
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.ltx2.diffusion_decoder import (
    DiffusionDecoder,
    decoding_bytes,
    load_diffusion_decoder,
)


def test_frames_equal_diffusers_and_the_sound_stays(tiny_folder25: Path) -> None:
    request = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=2, seed=5, stg_scale=0.0)
    pipeline = load_pipeline(str(tiny_folder25), device="cpu", vae_decoder="diffusion")
    assert isinstance(pipeline, Pipeline)
    media = pipeline(request)
    assert "LTX2VideoDiffusionDecoderModel, neighbourhood attention in boxes" in str(media.attention_report)
    assert media.audio is not None
    assert media.audio.samples.std() > 0.01
    decoder = pipeline.decoder.for_request(request)
    assert isinstance(decoder, DiffusionDecoder)
    theirs = LTX2VideoDiffusionDecoderModel.from_pretrained(tiny_folder25 / "diffusion_decoder").eval()
    latents = torch.randn(1, VIDEO_CHANNELS, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    mean, std = (each.view(1, -1, 1, 1, 1) for each in (theirs.latents_mean, theirs.latents_std))
    with torch.no_grad(), warnings.catch_warnings():
        raw = latents * std / theirs.config.scaling_factor + mean
        # It says that it runs without torch.compile.
        warnings.simplefilter("ignore")
        pixels = theirs.decode(raw, generator=decoder.noise(), return_dict=False)[0]
    expected = (pixels / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
    assert expected.std() > 0.1
    assert (decoder.decode(latents) - expected).abs().max() < 1e-5


def test_what_it_cannot_decode_is_refused_before_the_weights(
    tiny_folder25: Path, tiny_copy: Callable[[], Path]
) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(tiny_folder25), device="cpu", vae_decoder="diffusion")).rules
    with pytest.raises(RequestError, match="num_frames: expected 9 or more, got 1"):
        rules.resolve(GenerationRequest("a circle", **{**TINY_SIZES, "num_frames": 1}, stg_scale=0.0))
    with pytest.raises(ConfigError, match=r"vae_decoder: diffusion: .* has no diffusion_decoder .* leave out"):
        inspect_pipeline(RuntimeConfig(str(tiny_copy()), device="cpu", vae_decoder="diffusion"))


def test_tiles_of_any_size_give_the_whole_decode(tiny_folder25: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than one along frames and rows, in every stage that has so many; windows at all ends."""
    decoder = load_diffusion_decoder(ModelFolder(tiny_folder25), torch.device("cpu"), torch.float32)
    latents = torch.randn(1, VIDEO_CHANNELS, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    whole, wrong = decoder.decode(latents), []
    for depth, rows in ((5, 3), (16, 7)):
        monkeypatch.setattr(window_tiles, "DEPTH", depth)
        monkeypatch.setattr(window_tiles, "rows_of_tile", lambda _, rows=rows: rows)
        chunks = list(decoder.stream(latents).chunks)
        assert len(chunks) == -(-17 // depth)
        difference = float((torch.cat(chunks, dim=1) - whole).abs().max())
        wrong += [] if difference < 1e-5 else [(depth, rows, difference)]
    assert not wrong
    assert whole.std() > 0.1


def test_the_plan_of_a_long_clip_is_two_tensors_of_it_and_a_slab(tiny_folder25: Path) -> None:
    short, long = (decoding_bytes(ModelFolder(tiny_folder25), torch.float32, 256, 256, frames) for frames in (241, 481))
    # 64 x 64 tokens a frame of 8 channels.
    assert long - short == 2 * 240 * 64 * 64 * 8 * 4
