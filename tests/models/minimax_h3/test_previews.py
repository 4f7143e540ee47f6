"""Previews of clips with sound: of a transformer that knows the data, they show it at any step, by any sampler."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import relative
from tables import table
from tiny_minimax_h3 import TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.part_schedules import estimate_along_schedule_of_sound, with_schedule_of_sound
from diffusion_runtime.generation.latent_denoiser import LatentDenoiser
from diffusion_runtime.models.minimax_h3.transformer import MiniMaxH3Transformer

SIZE = ClipSize(64, 96, 22, 24)
# The published shifts: from the pictures' levels to the sound's.
SHIFT = 3.0 / 12.0


@pytest.fixture(scope="module")
def pipeline(tiny_minimax_h3_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_minimax_h3_folder), device="cpu")


@table("sampler", [None, "flow_match_euler", "er_sde"])
def test_a_preview_of_an_oracle_is_the_data(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, sampler: str | None
) -> None:
    geometry = pipeline.rules.sampling.geometry
    data = torch.randn(1, *geometry.sample_shape(SIZE), generator=torch.Generator().manual_seed(7))

    def knowing(_: Any, latents: torch.Tensor, timestep: torch.Tensor, *others: Any) -> torch.Tensor:
        """The velocity of each part at its own level, noise minus data."""
        level = timestep[0].double() / 1000
        found, known = geometry.parts(latents.double(), SIZE), geometry.parts(data.double(), SIZE)
        assert found.audio is not None
        assert known.audio is not None
        sound = (found.audio - known.audio) / shifted(level, SHIFT)
        return geometry.join((found.video - known.video) / level, sound)

    monkeypatch.setattr(MiniMaxH3Transformer, "forward", knowing)
    shown: list[torch.Tensor] = []
    denoise = LatentDenoiser.denoise

    def recorded(*given: Any, **named: Any) -> Any:
        denoised = denoise(*given, **named)
        shown.append(denoised.latents)
        return denoised

    monkeypatch.setattr(LatentDenoiser, "denoise", recorded)
    asked = GenerationRequest("rain", **TINY_SIZES, num_inference_steps=4, seed=3, sampler=sampler)
    for stop in (1, 2, 3, None):
        pipeline(dataclasses.replace(asked, stop_after_step=stop))
        of_ours, expected = geometry.parts(shown[-1], SIZE), geometry.parts(data, SIZE)
        assert of_ours.audio is not None
        assert expected.audio is not None
        assert relative(of_ours.video, expected.video) < 1e-5
        assert relative(of_ours.audio, expected.audio) < 1e-5


@table(("level", "after"), [(1.0, 0.9), (0.6, 0.55), (0.3, 0.0)])
def test_an_estimate_is_the_sound_without_its_own_noise_in_float64(
    pipeline: Pipeline, level: float, after: float
) -> None:
    geometry, generator = pipeline.rules.sampling.geometry, torch.Generator().manual_seed(1)
    shape = (1, *geometry.sample_shape(SIZE))
    latents, velocity = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    step = StepInfo(0, 4, timestep=1000 * level, sigma=level, next_timestep=1000 * after)
    along = with_schedule_of_sound(lambda *_: velocity, geometry, SIZE, SHIFT)(latents, step)
    found = geometry.parts(estimate_along_schedule_of_sound(latents, along, step, geometry, SIZE, SHIFT), SIZE)
    at, own = geometry.parts(latents, SIZE), geometry.parts(velocity, SIZE)
    assert found.audio is not None
    assert at.audio is not None
    assert own.audio is not None
    # tau = s * sigma / (1 + (s - 1) * sigma) with s a quarter.
    assert relative(found.audio, at.audio - level / (4 - 3 * level) * own.audio) < 1e-12
    assert relative(found.video, at.video - level * own.video) < 1e-12
