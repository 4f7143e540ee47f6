"""A video that LTX-2 makes for a sound: how files are read, what is encoded, and what comes of it."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio
from sound_files import write_wave
from tables import table
from tiny_ltx2 import AUDIO_BINS, TINY_SIZES
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import RequestError
from diffusion_runtime.layers.log_mel import log_mel_spectrogram
from diffusion_runtime.media.audio import read_sound
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry

SIZE = ClipSize(*(TINY_SIZES[name] for name in ("height", "width", "num_frames", "fps")))


@pytest.fixture(scope="module")
def ours(tiny_folder: Path) -> Pipeline:
    pipeline = load_pipeline(str(tiny_folder), device="cpu")
    assert isinstance(pipeline, Pipeline)
    return pipeline


def request(path: str | None, **values: Any) -> GenerationRequest:
    fields = {**TINY_SIZES, "num_inference_steps": 2, "guidance_scale": 1.0, "seed": 5, "audio_path": path}
    return GenerationRequest(**({"prompt": "a red circle"} | fields | values))


def expected_mel(samples: numpy.ndarray, rate: int, num_bins: int) -> torch.Tensor:
    """By transformers, [channels, frames, bins]."""
    filters = mel_filter_bank(513, num_bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    window = window_function(1024, "hann")
    mels = [
        spectrogram(each, window, 1024, 160, power=1.0, mel_filters=filters, mel_floor=1e-5, log_mel="log")
        for each in samples.astype(numpy.float64)
    ]
    return torch.from_numpy(numpy.stack(mels)).float().transpose(1, 2)


def test_the_spectrogram_is_transformers(tmp_path: Path) -> None:
    samples = read_sound(write_wave(tmp_path / "a.wav"), "audio_path", 0.9, 16000).samples
    found = log_mel_spectrogram(torch.from_numpy(samples), 16000, num_bins=64, hop_length=160)
    expected = expected_mel(samples, 16000, 64)
    assert found.shape == expected.shape == (2, 91, 64)
    # In float32 against float64: bins that are nearly silent differ most.
    assert (found - expected).abs().max() < 1e-2
    assert (found - expected).abs().mean() < 1e-3
    assert expected.std() > 1


def test_the_condition_is_what_diffusers_encodes(ours: Pipeline, tiny_folder: Path, tmp_path: Path) -> None:
    path = write_wave(tmp_path / "a.wav")
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    condition = ours.parts.load_image_conditioner().condition(request(path), SIZE)
    assert isinstance(condition, ImageCondition)
    assert condition.sound is not None
    assert condition.latents.shape[2] == 0
    # 9 latents of 4 frames: one more than there are hops of 160.
    theirs = AutoencoderKLLTX2Audio.from_pretrained(tiny_folder / "audio_vae", dtype=torch.float32).eval()
    samples = read_sound(path, "audio_path", 35 * 160 / 16000, 16000).samples
    mel = expected_mel(samples, 16000, 4 * AUDIO_BINS)[None]
    with torch.no_grad():
        mode = theirs.encode(mel).latent_dist.mode()
    packed = mode.transpose(1, 2).flatten(2)
    normal = (packed - theirs.latents_mean) / theirs.latents_std
    found = condition.sound.transpose(1, 2).flatten(2)
    assert found.shape == normal.shape == (1, geometry.audio_shape(SIZE)[1], theirs.latents_mean.numel())
    assert (found - normal).norm() < 1e-3 * normal.norm()


def test_a_video_for_a_sound_has_that_sound_and_pictures_of_its_own(ours: Pipeline, tmp_path: Path) -> None:
    path = write_wave(tmp_path / "a.wav", rate=48000)
    given, other = ours(request(path)), ours(request(write_wave(tmp_path / "b.wav", pitch=3000.0)))
    assert given.audio is not None
    with wave.open(path, "rb") as file:
        samples = numpy.frombuffer(file.readframes(round(9 / 25 * 48000)), "<i2").reshape(-1, 2).T / 32768
    assert given.audio.samples.shape == samples.shape
    assert numpy.abs(given.audio.samples - samples).max() < 1e-4
    for made in (other, ours(request(None))):
        assert numpy.abs(given.frames.astype(int) - made.frames.astype(int)).max() > 2
    assert len(given.recipe["inputs"]["audio_path"]) == 64
    libraries = {part.component for part in given.attention_report.libraries}
    assert "audio vae encoder" in libraries
    assert "vae encoder" not in libraries


@table(
    ("make", "told"),
    [
        (lambda path: write_wave(path / "a.wav", seconds=0.2), "expected at least 0.36 seconds, .* got 0.20"),
        (lambda path: str(path / "no.wav"), "audio_path.*no.wav"),
        (lambda path: write(path / "a.wav", b"RIFF, or so it says" * 9), "is not readable as sound"),
        (lambda path: write(path / "a.m3u", b"#EXTM3U\n/etc/passwd"), "expected a file that ends in .wav"),
    ],
    ids=["too short", "missing", "damaged", "a playlist"],
)
def test_what_is_no_sound_is_refused_before_any_work(ours: Pipeline, tmp_path: Path, make: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        ours.resolve(request(make(tmp_path)))


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)
