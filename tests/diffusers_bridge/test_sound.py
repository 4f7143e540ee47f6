"""Sound that diffusers' own pipelines make."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from tiny_ltx2 import TINY_SIZES, write_tiny_ltx2

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.diffusers_bridge.frames import sound_of


def test_the_sound_of_a_pipeline_is_written_with_its_pictures(tmp_path: Path) -> None:
    pipeline = load_pipeline(
        str(write_tiny_ltx2(tmp_path / "model")), device="cpu", dtype="float32", backend="diffusers"
    )
    media = pipeline(GenerationRequest(prompt="a red circle", **TINY_SIZES, num_inference_steps=2, guidance_scale=2.0))
    assert media.audio is not None
    assert (media.audio.num_channels, media.audio.sample_rate) == (2, 4000)
    # 9 moments of four frames of ten milliseconds, of which the first moment holds one; 40 samples a frame.
    assert media.audio.samples.shape[1] == pytest.approx(33 * 40, abs=1)
    assert numpy.abs(media.audio.samples).max() > 0.01
    assert media.recipe["notes"] == []
    assert media.save(tmp_path / "clip.mp4").is_file()


def test_sound_of_an_unknown_rate_is_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    result = SimpleNamespace(audio=torch.zeros(1, 2, 8))
    with caplog.at_level(logging.WARNING):
        sound, notes = sound_of(result, SimpleNamespace())
    assert sound is None
    assert notes == ["the pipeline made sound as well, which is not written: its sample rate is unknown"]
    assert sound_of(SimpleNamespace(frames=None), SimpleNamespace()) == (None, [])
